"""Ctrl-C at a moment when it can do no harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, the first Ctrl-C waits for the end: a step that is left half way has donated its caches and not kept
    what came back, or has taken blocks that no request holds. A second Ctrl-C does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only ever interrupt the main thread
        return
    received = False
    previous = signal.getsignal(signal.SIGINT)

    def note(*_: Any) -> None:
        nonlocal received
        received = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        signal.raise_signal(signal.SIGINT)
