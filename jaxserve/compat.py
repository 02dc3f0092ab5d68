"""Everything that differs between JAX versions or platforms, and JAX's process-wide settings."""

from __future__ import annotations

import ctypes
import hashlib
import io
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.tree_util import PyTreeDef


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


SOON_READY = {"xla_cpu_experimental_ynn_fusion_type": ""}
"""XLA's options for a CPU program that is to run soon and not often: without YNN, whose kernels are a quarter faster
and take longer to load and to set up than they save in one step."""


def return_freed_memory() -> None:
    """Gives back to the system what the C library keeps after a compile, hundreds of MB, where it has a call for it."""
    _call_c_library("malloc_trim", 0)


_M_MXFAST = 1  # of malloc.h


def _call_c_library(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)


def forget_profile() -> None:
    """Lets a profile be started again after one that could not be written, to which JAX would hold on."""
    from jax._src import profiler  # no public name

    profiler._profile_state.reset()


def processor_fingerprint() -> str:
    """The same for processors that can run each other's programs."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(flags.encode()).hexdigest()[:12]


class Loaded(NamedTuple):
    """A program of `serialize_executable.serialize`, in memory, before it is known what trees its arguments form."""

    executable: Any
    args_info: list[Any]
    no_kwargs: bool

    def compiled(self, in_tree: PyTreeDef, out_tree: PyTreeDef) -> jax.stages.Compiled:
        return jax.stages.Compiled(self.executable, [], in_tree.unflatten(self.args_info), out_tree,
                                   no_kwargs=self.no_kwargs)


def load_program(content: bytes, devices: Sequence[jax.Device]) -> Loaded:
    """`serialize_executable.deserialize_and_load`, in two steps; that one wants to know the trees first. It runs code
    from `content`."""
    # Loading frees large and small pieces by the thousand. At every large one glibc merges the small ones, a sixth of
    # the time, unless it does so with each at once.
    _call_c_library("mallopt", _M_MXFAST, 0)
    unpickler = serialize_executable._JaxPjrtUnpickler(io.BytesIO(content), devices[0].client, list(devices))
    unloaded, args_info, no_kwargs = unpickler.load()
    return Loaded(unloaded.load(), args_info, no_kwargs)
