"""Counts what JAX traces and compiles, whoever asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENTS = {"/jax/core/compile/jaxpr_trace_duration": "traced", "/jax/core/compile/backend_compile_duration": "compiled"}


@contextmanager
def count_compilations() -> Iterator[Counter[str]]:
    """Yields a counter of "traced" and "compiled" (found in the persistent cache or not); little eager operations that
    are new to JAX count too."""
    counts: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS:
            counts[_EVENTS[event]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
