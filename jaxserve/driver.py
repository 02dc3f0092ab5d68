"""Is there an NVIDIA driver? Needs no jax, so that it can be asked before jax is imported."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec


def use_cpu_without_driver() -> None:
    """Keeps JAX from trying GPUs on a machine that has its CUDA plugin but no driver (it serves to compile for GPUs):
    JAX would print pages of complaint before it took the CPU. Does nothing if JAX_PLATFORMS says what to use."""
    if os.environ.get("JAX_PLATFORMS") or not _has_cuda_plugin() or _has_driver():
        return
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
        return
    import jax

    if not getattr(jax.config, "jax_platforms"):  # noqa: B009 (the stubs lack it)
        jax.config.update("jax_platforms", "cpu")


def _has_cuda_plugin() -> bool:
    if find_spec("jax_plugins") is None:
        return False
    return any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
