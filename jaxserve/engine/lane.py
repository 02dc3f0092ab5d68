"""Work beside the engine's thread, for coroutines that wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """A thread that does one thing after the other. Whoever waits for it can be cancelled, or told that the end has
    come, at any moment; what the thread is at goes on, and what has not begun never does."""

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, name)
        self._waiting: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._error: Callable[[], Exception] | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """What the function returns or raises; or the error that `end` was given."""
        future: Future[T] = Future()
        future.add_done_callback(self._waiting.discard)
        with self._lock:
            if self._error is not None:
                raise self._error()
            self._waiting.add(future)
            self._executor.submit(_do, future, function)
        return await asyncio.wrap_future(future)

    def end(self, error: Callable[[], Exception]) -> None:
        """Everybody who waits gets an error of their own, and whoever comes later."""
        with self._lock:
            self._error = error
            waiting = [*self._waiting]
        for future in waiting:
            with suppress(InvalidStateError):  # it is done, or was cancelled, just now
                future.set_exception(error())

    def join(self) -> None:
        """After `end`: waits for what the thread is at."""
        self._executor.shutdown()


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """The function's result, or its exception, becomes the future's.

    Raises:
      InvalidStateError: the future has one, or was cancelled, by now.
    """
    try:
        result = function()
    except Exception as error:  # the caller's, not the thread's
        future.set_exception(error)
    else:
        future.set_result(result)


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.done():
        with suppress(InvalidStateError):  # nobody waits any more
            settle(future, function)
