"""Who may ask, how much, and how many things at a time. Plain ASGI middlewares: they must not stand in the way of
streams."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/docs", "/openapi.json"})
"""Answered without a key: nothing there costs the engine anything or tells what others asked."""


class ApiKeys:
    """Everything but the open paths needs `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Set[str]):
        self._app, self._open_paths = app, open_paths
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is missing or wrong: send it as `Authorization: Bearer KEY`",
                         type="authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["path"] in self._open_paths:
            return True
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # All are compared, in constant time: how long it takes must not tell how much was right.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies above a size with 413, before they are read where their length is announced."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await self._error().response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, counted, send)

    def _error(self) -> ApiError:
        # What was not read of the body is still on its way, so the connection cannot be used again.
        return ApiError(413, f"the request's body is larger than max_body_bytes={self._max_bytes}",
                        code="body_too_large", headers={"connection": "close"})


class ClientLimit:
    """At most so many requests of one client at a time; more get 429.

    Args:
      by_key: a client is an API key, which was checked before; else an address.
    """

    def __init__(self, app: ASGIApp, max_concurrent: int, *, by_key: bool):
        self._app, self._max_concurrent, self._by_key = app, max_concurrent, by_key
        self._running: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        client = self._client(scope)
        if self._running[client] >= self._max_concurrent:
            error = ApiError(429, f"more than {self._max_concurrent} requests of one client at a time",
                             type="rate_limit_error", code="too_many_requests", headers={"retry-after": "1"})
            await error.response()(scope, receive, send)
            return
        self._running[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _client(self, scope: Scope) -> bytes:
        if self._by_key:
            return _digest(Headers(scope=scope).get("authorization", ""))
        host, _ = scope.get("client") or ("", 0)
        return host.encode()


def _digest(text: str) -> bytes:
    """Of equal length for all texts; keys themselves are not kept."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
