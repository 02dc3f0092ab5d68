"""One OpenTelemetry span for each request, as the child of the caller's (W3C trace context)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidInputError

if TYPE_CHECKING:
    from jaxserve.server.context import RequestRecord


class Tracing:
    """Sends spans to an OTLP collector, or does nothing.

    Args:
      endpoint: of OTLP over HTTP; None: no spans.
      exporter: instead of one for the endpoint.
    """

    def __init__(self, endpoint: str | None = None, exporter: Any = None):
        self._provider: Any = None
        if endpoint is None and exporter is None:
            return
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InvalidInputError("otlp_traces_endpoint", endpoint,
                                    f"only with `pip install 'jaxserve[tracing]'` ({error})") from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))

    @contextmanager
    def span(self, scope: Mapping[str, Any], headers: Mapping[str, str], record: RequestRecord) -> Iterator[None]:
        """Around a request; its attributes are set from the record at the end."""
        if self._provider is None or not scope["path"].startswith(("/v1/", "/generate")):
            yield
            return
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers))
        tracer = self._provider.get_tracer("jaxserve")
        with tracer.start_as_current_span("llm_request", context=parent, kind=SpanKind.SERVER) as span:
            try:
                yield
            finally:
                span.set_attributes(_attributes(scope, record))
                if record.failure is not None or record.status >= 500:
                    span.set_status(StatusCode.ERROR, record.failure)

    def shutdown(self) -> None:
        """Sends what is left."""
        if self._provider is not None:
            self._provider.shutdown()


def _attributes(scope: Mapping[str, Any], record: RequestRecord) -> dict[str, Any]:
    """Names of OpenTelemetry's semantic conventions, and vLLM's where these have none."""
    found: dict[str, Any] = {"url.path": scope["path"], "http.response.status_code": record.status,
                             "gen_ai.request.id": record.request_id}
    if record.model is not None:
        found |= {"gen_ai.response.model": record.model, "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
                  "gen_ai.usage.completion_tokens": record.num_generated_tokens,
                  "gen_ai.response.finish_reasons": record.finish_reasons}
    metrics = record.metrics
    if metrics is not None and metrics.first_token_time_s is not None and metrics.first_scheduled_time_s is not None:
        arrival, scheduled, first = metrics.arrival_time_s, metrics.first_scheduled_time_s, metrics.first_token_time_s
        last = metrics.last_token_time_s or first
        found |= {"gen_ai.latency.time_in_queue": scheduled - arrival,
                  "gen_ai.latency.time_to_first_token": first - arrival,
                  "gen_ai.latency.time_in_model_prefill": first - scheduled,
                  "gen_ai.latency.time_in_model_decode": last - first, "gen_ai.latency.e2e": last - arrival}
    return found
