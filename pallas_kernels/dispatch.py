"""Which implementation of a kernel runs: an explicit choice, or one by device; said once in the log.

A kernel's api.py keeps a mapping of backend name -> function. A new backend (triton.py, mosaic.py) is one more entry
there. What a backend cannot do it says as a reason in words: an automatic choice then goes on to the next one, a named
backend raises.
"""

import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

logger = logging.getLogger(__name__)

Implementation = TypeVar("Implementation", bound=Callable[..., Any])
Refusal = Callable[[], str | None]

# Best first. A platform that is not listed, or has none of these for a kernel, runs the reference.
# Mosaic comes after Triton until both have been timed on a card.
PREFERRED_BACKENDS: dict[str, tuple[str, ...]] = {"gpu": ("triton", "mosaic"), "cpu": ()}
# The oldest GPU, as (major, minor) compute capability, that a backend's compiler serves. Others run anywhere.
OLDEST_GPU: dict[str, tuple[int, int]] = {"mosaic": (9, 0), "triton": (8, 0)}


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
        platform: "cpu", "gpu" or another of JAX's.
        capability: (major, minor) compute capability of an NVIDIA GPU; None elsewhere.
        num_cores: streaming multiprocessors of a GPU; 1 elsewhere.
    """

    platform: str
    capability: tuple[int, int] | None = None
    num_cores: int = 1


_compiling_for: ContextVar[jax.Device | None] = ContextVar("compiling_for", default=None)


@contextmanager
def compiling_for(device: jax.Device) -> Iterator[None]:
    """What is traced inside runs on this device, where a call names none: that of a mesh, perhaps of a topology that
    exists only for the compiler. Traces that JAX keeps do not know of it: whoever uses this makes the device part of
    their key (e.g. by a static argument)."""
    token = _compiling_for.set(device)
    try:
        yield
    finally:
        _compiling_for.reset(token)


def target_of(device: jax.Device | None = None) -> Target:
    """The target that `device` is: a real device, or one of a topology that is only compiled for.

    Args:
        device: None is that of `compiling_for`, else the first of JAX's default devices.
    """
    device = device or _compiling_for.get() or jax.devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform != "gpu" or capability is None:  # without one: not NVIDIA's
        return Target(device.platform)
    return Target("gpu", (int(capability[1]), int(capability[2])), int(getattr(device, "core_count", 1)))


def choose_backend(
    kernel: str,
    backend: str | None,
    implementations: Mapping[str, Implementation],
    *,
    device: jax.Device | None = None,
    refusals: Mapping[str, Refusal] | None = None,
) -> Implementation:
    """The function that runs `kernel`.

    Args:
        kernel: name for messages and the log.
        backend: a key of `implementations`; None takes the first preferred one of the platform that can run.
        implementations: backend name -> function; always has "reference".
        device: what the program is compiled for; None is JAX's default device.
        refusals: backend name -> says why it cannot serve this call (shapes, dtypes), or None if it can; asked only
            where the backend can run.

    Raises:
        ValueError: `backend` is named, but this kernel does not have it.
        NotImplementedError: `backend` is named, but cannot run on the device or refuses the call. A named backend is
            never replaced by another.
    """
    if backend is not None and backend not in implementations:
        raise ValueError(f"backend={backend!r} of kernel {kernel}: allowed are {sorted(implementations)} or None")
    target = target_of(device)
    refusals = refusals or {}
    reasons = {name: _cannot_run(name, target) or (refusals[name]() if name in refusals else None)
               for name in implementations}
    if backend is not None:
        if reasons[backend]:
            raise NotImplementedError(f"backend={backend!r} of kernel {kernel}: {reasons[backend]}")
        _log_once(kernel, backend, "asked for")
        return implementations[backend]
    preferred = [name for name in PREFERRED_BACKENDS.get(target.platform, ()) if name in implementations]
    chosen = next((name for name in preferred if not reasons[name]), "reference")
    passed_over = "".join(f"; not {name}: {reasons[name]}" for name in preferred if reasons[name])
    _log_once(kernel, chosen, f"chosen for {target.platform}{passed_over}")
    return implementations[chosen]


def _cannot_run(backend: str, target: Target) -> str | None:
    oldest = OLDEST_GPU.get(backend)
    if oldest is None:
        return None
    needs = f"needs a GPU of compute capability {oldest[0]}.{oldest[1]} or newer"
    if target.capability is None:
        return f"{needs}, not the platform {target.platform!r}"
    if target.capability < oldest:
        return f"{needs}, not {target.capability[0]}.{target.capability[1]}"
    return None


@functools.cache
def _log_once(kernel: str, backend: str, how: str) -> None:
    logger.info("kernel %s: backend %s (%s)", kernel, backend, how)
