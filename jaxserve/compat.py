"""Everything that differs between JAX versions or platforms, and JAX's process-wide settings."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax


def use_compilation_cache(directory: str | None, device_platform: str) -> None:
    """Turns on JAX's persistent compilation cache, unless "" says not to.

    Args:
      directory: where; None: what the user set up in JAX, else ~/.cache/jaxserve/xla.
      device_platform: "cpu" programs go to a folder of their own for each kind of processor: one compiled for
        another may crash.
    """
    users_own = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (the stubs lack it)
    if directory == "" or (directory is None and users_own):
        return
    place = Path(directory).expanduser() if directory else Path.home() / ".cache" / "jaxserve" / "xla"
    if device_platform == "cpu":
        place /= f"cpu-{processor_fingerprint()}"
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def reserve_gpu_memory(share: float) -> None:
    """Lets JAX have so much of each GPU's memory; by itself it takes three quarters. What the user set stays, and it is
    too late once JAX has looked for devices."""
    from jax._src.xla_bridge import backends_are_initialized  # no public name

    if not backends_are_initialized():
        os.environ.setdefault(_MEMORY_FRACTION, str(share))


def gpu_memory_fraction() -> float:
    """The share of each GPU's memory that JAX has."""
    return float(os.environ.get(_MEMORY_FRACTION, 0.75))


def return_freed_memory() -> None:
    """Gives back to the system what the C library keeps after a compile, hundreds of MB, where it has a call for it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def processor_fingerprint() -> str:
    """The same for processors that can run each other's programs."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(flags.encode()).hexdigest()[:12]
