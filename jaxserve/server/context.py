"""What is known of an HTTP request besides its body: id, client, and, when it is over, how it went."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.request import RequestMetrics
from jaxserve.server.errors import as_api_error
from jaxserve.server.pacing import Turns
from jaxserve.server.tracing import Tracing

logger = logging.getLogger("jaxserve.access")

_ACCEPTABLE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_QUIET = ("/health", "/metrics")  # asked every few seconds


@dataclass
class RequestRecord:
    """For log and trace; filled while the request is served.

    Attributes:
      request_id: the caller's x-request-id, else a new one.
      failure: what was told to the caller after the answer had begun.
      metrics: of the first prompt.
    """

    request_id: str
    start_s: float = field(default_factory=time.monotonic)
    status: int = 0
    failure: str | None = None
    model: str | None = None
    stream: bool = False
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    metrics: RequestMetrics | None = None

    @classmethod
    def of(cls, scope: MutableMapping[str, Any]) -> RequestRecord:
        """The one that `RequestContext` made for this request."""
        record = scope["state"]["record"]
        assert isinstance(record, cls)
        return record


class RequestContext:
    """Outermost middleware: gives requests their ids, logs how they ended, and spans them. Logs no bodies."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self._app, self._tracing, self._turns = app, tracing, Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        record = RequestRecord(given if _ACCEPTABLE_ID.fullmatch(given) else uuid.uuid4().hex)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        with self._tracing.span(scope, headers, record):
            try:
                if scope["method"] == "POST":
                    await self._turns.take()
                await self._app(scope, receive, send_with_id)
            except Exception as error:
                if record.status:
                    raise  # too late to say so
                await as_api_error(error).response()(scope, receive, send_with_id)
            finally:
                _log(scope, record)


def _log(scope: Scope, record: RequestRecord) -> None:
    level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields: dict[str, Any] = {"request_id": record.request_id, "method": scope["method"], "path": scope["path"],
                              "status": record.status, "seconds": round(time.monotonic() - record.start_s, 4)}
    if record.model is not None:
        fields |= {"model": record.model, "stream": record.stream, "prompt_tokens": record.num_prompt_tokens,
                   "generated_tokens": record.num_generated_tokens, "finish_reasons": record.finish_reasons}
    if record.failure is not None:
        fields["failure"] = record.failure
    logger.log(level, json.dumps(fields), extra={"fields": fields})
