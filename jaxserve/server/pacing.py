"""Keeps the event loop responsive when many requests come at the same moment."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Lets only so many requests begin in one iteration of the event loop; the others follow in their order.

    Reading, checking and queueing a request takes most of a millisecond. Two hundred that come together would keep
    everything else waiting, /health too, since the loop runs all that is ready before it looks for something new.
    """

    def __init__(self, per_iteration: int = 8):
        self._per_iteration = self._left = per_iteration
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def take(self) -> None:
        """Returns when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_iteration, loop)
        if self._left:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._per_iteration
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else the caller was cancelled
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < self._per_iteration
        if self._counting:
            loop.call_soon(self._next_iteration, loop)
