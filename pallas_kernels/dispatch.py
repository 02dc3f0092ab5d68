"""Which implementation of a kernel runs: an explicit choice, or one by platform; said once in the log.

A kernel's api.py keeps a mapping of backend name -> function. A new backend (triton.py, mosaic.py) is one more entry
there; what an entry cannot do on this device it must refuse itself, with NotImplementedError.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

logger = logging.getLogger(__name__)

# Best first. A platform that is not listed, or has none of these for a kernel, runs the reference.
PREFERRED_BACKENDS: dict[str, tuple[str, ...]] = {"gpu": ("mosaic", "triton"), "cpu": ()}


def choose_backend(
    kernel: str,
    backend: str | None,
    implementations: Mapping[str, Callable[..., Any]],
    *,
    platform: str | None = None,
) -> Callable[..., Any]:
    """The function that runs `kernel`.

    Args:
        kernel: name for messages and the log.
        backend: a key of `implementations`; None takes the platform's preferred one.
        implementations: backend name -> function; always has "reference".
        platform: what the program is compiled for ("cpu", "gpu"); None is JAX's default backend.

    Raises:
        ValueError: `backend` is named, but this kernel does not have it. A named backend is never replaced by another.
    """
    if backend is not None and backend not in implementations:
        raise ValueError(f"backend={backend!r} of kernel {kernel}: allowed are {sorted(implementations)} or None")
    how = "asked for"
    if backend is None:
        platform = platform or jax.default_backend()
        preferred = [name for name in PREFERRED_BACKENDS.get(platform, ()) if name in implementations]
        backend, how = (preferred or ["reference"])[0], f"chosen for {platform}"
    _log_once(kernel, backend, how)
    return implementations[backend]


@functools.cache
def _log_once(kernel: str, backend: str, how: str) -> None:
    logger.info("kernel %s: backend %s (%s)", kernel, backend, how)
