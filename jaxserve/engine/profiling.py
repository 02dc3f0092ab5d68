"""Recording what host and device do."""

from __future__ import annotations

import jax

from jaxserve import compat


def start(directory: str) -> None:
    """Records until `stop`, as a trace for xprof or Perfetto. One recording at a time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would drown, and slow down, what is to be seen
    jax.profiler.start_trace(directory, create_perfetto_trace=True, profiler_options=options)


def stop() -> None:
    """Ends the recording and writes it.

    Raises:
      RuntimeError: there is none.
      OSError: it cannot be written, and is lost.
    """
    try:
        jax.profiler.stop_trace()
    except (jax.errors.JaxRuntimeError, OSError) as error:
        compat.forget_profile()
        raise OSError(f"the recording is lost: {error}") from error
