"""What the engine counts, for dashboards: written by the engine's thread, read by any."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxserve.request import Request, RequestMetrics

_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_WAIT_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_REQUEST_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of values up to each bound, and above all of them; not cumulative.

    Only one thread may `observe`. Others see each list element and the sum as they are at some moment, and may see one
    value that is counted but not yet summed.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class EngineHistograms:
    """Times in seconds, sizes in tokens. Names as vLLM's metrics.

    Attributes:
      time_to_first_token_seconds: of a request, from its arrival.
      inter_token_latency_seconds: between two tokens of a completion; request_time_per_output_token_seconds: their mean
        over a completion.
      e2e_request_latency_seconds: from arrival to the last token; request_inference_time_seconds: without the queue.
      request_queue_time_seconds, request_prefill_time_seconds, request_decode_time_seconds: until the request was
        first scheduled, from then to its first token, from there to its last.
      request_prompt_tokens, request_generation_tokens, request_params_max_tokens, request_params_n: of a request.
      iteration_tokens_total: tokens that a step computed.
    """

    time_to_first_token_seconds: Histogram = field(default_factory=partial(Histogram, _WAIT_S))
    inter_token_latency_seconds: Histogram = field(default_factory=partial(Histogram, _STEP_S))
    request_time_per_output_token_seconds: Histogram = field(default_factory=partial(Histogram, _STEP_S))
    e2e_request_latency_seconds: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    request_queue_time_seconds: Histogram = field(default_factory=partial(Histogram, _WAIT_S))
    request_inference_time_seconds: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    request_prefill_time_seconds: Histogram = field(default_factory=partial(Histogram, _WAIT_S))
    request_decode_time_seconds: Histogram = field(default_factory=partial(Histogram, _REQUEST_S))
    request_prompt_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    request_generation_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    request_params_max_tokens: Histogram = field(default_factory=partial(Histogram, _TOKENS))
    request_params_n: Histogram = field(default_factory=partial(Histogram, _FEW))
    iteration_tokens_total: Histogram = field(default_factory=partial(Histogram, _TOKENS))

    def finished(self, request: Request, metrics: RequestMetrics) -> None:
        """A completion has got its last token."""
        self.request_prompt_tokens.observe(request.num_prompt_tokens)
        self.request_generation_tokens.observe(len(request.output_token_ids))
        if request.params.max_tokens is not None:
            self.request_params_max_tokens.observe(request.params.max_tokens)
        arrival, scheduled = metrics.arrival_time_s, metrics.first_scheduled_time_s
        first, last = metrics.first_token_time_s, metrics.last_token_time_s
        assert scheduled is not None and first is not None and last is not None, "ended without a token"
        self.e2e_request_latency_seconds.observe(last - arrival)
        self.request_queue_time_seconds.observe(scheduled - arrival)
        self.request_inference_time_seconds.observe(last - scheduled)
        self.request_prefill_time_seconds.observe(first - scheduled)
        self.request_decode_time_seconds.observe(last - first)
        if len(request.output_token_ids) > 1:
            self.request_time_per_output_token_seconds.observe(
                (last - first) / (len(request.output_token_ids) - 1))


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine at one moment. Counters since it was made.

    Attributes:
      num_running, num_waiting: sequences.
      kv_cache_usage: share of the blocks that sequences hold, 0 to 1.
      prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found.
      finish_reasons: finish reason -> completions.
      histograms: live, not copied.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_steps: int
    num_timed_out: int
    num_refused: int
    num_draft_tokens: int
    num_accepted_tokens: int
    finish_reasons: Counter[str]
    histograms: EngineHistograms
