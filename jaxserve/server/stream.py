"""Answers that come in pieces, and clients that do not wait for the end of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.server.errors import ClientGoneError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: bytes | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (data.encode() if isinstance(data, str) else data) + b"\n\n"


class EventStream(Response):
    """Sends pieces as they come; closes their generator when the client goes away.

    Starlette's own StreamingResponse leaves a generator that is not running at that moment to the garbage collector.
    """

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None], media_type: str | None = None):
        super().__init__(media_type=media_type, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            async with aclosing(self._pieces):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for piece in self._pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})

        try:
            await _until_gone(send_all(), _gone(receive))
        except ClientGoneError:
            return


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client goes away. The request's body must be read.

    Raises:
      ClientGoneError: it did.
    """
    return await _until_gone(work, _gone(request.receive))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_gone(work: Coroutine[Any, Any, T], gone: Awaitable[None]) -> T:
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
