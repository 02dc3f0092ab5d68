"""One connection: uvicorn's, with a limit for what comes before a request's body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.server.errors import ErrorDetail, ErrorResponse

if TYPE_CHECKING:
    import asyncio

MAX_HEAD_BYTES = 64 << 10
"""Of request line and headers together. The parser keeps them in memory, whatever their size."""
RECEIVE_TIMEOUT_S = 60.0
"""For all of a request, from when the connection is there or the request begins."""


class TooLongError(Exception):
    """The head of a request is; the parser takes it for one that is malformed."""


class Connection(HttpToolsProtocol):
    """Answers 431, in the form of all errors, and hangs up when a request's head is too long; hangs up when a request
    does not come."""

    transport: asyncio.Transport
    _timer: asyncio.TimerHandle
    _in_head = True
    _head = _unparsed = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(RECEIVE_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A header is passed on once it is complete, which one without end never is.
        self._unparsed = self._unparsed + len(data) if self._in_head else 0
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        self._timer.cancel()
        self._timer = self.loop.call_later(RECEIVE_TIMEOUT_S, self._give_up)
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._timer.cancel()
        super().on_message_complete()

    def _give_up(self) -> None:
        if not self._in_head or self.cycle is None or self.cycle.response_complete:  # else it still gets an answer
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head > MAX_HEAD_BYTES:
            self._refuse()
        else:
            super().send_400_response(msg)

    def _count(self, part: bytes) -> None:
        self._head += len(part)
        if self._head > MAX_HEAD_BYTES:
            raise TooLongError

    def _refuse(self) -> None:
        error = ErrorDetail(message=f"the request's headers are longer than {MAX_HEAD_BYTES} bytes",
                            type="invalid_request_error", code="headers_too_large")
        body = ErrorResponse(error=error).model_dump_json().encode()
        self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
                             b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        self.transport.close()
