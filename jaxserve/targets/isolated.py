"""Compiling in a process of its own, for kernels that may take the compiler, and this process, down with them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from jaxserve.targets.compiling import compile_for
from jaxserve.targets.program import CompiledProgram
from jaxserve.targets.target import Target

_pools: dict[str, ProcessPoolExecutor] = {}
"""By architecture: Mosaic compiles for one in a process."""


def compile_isolated(function: Callable[..., Any], *args: Any, target: Target, **options: Any) -> CompiledProgram:
    """As `compile_for`, in another process, which is kept for the next call; the result's `compiled` is None.

    For Mosaic kernels: JAX 0.12 aborts where LLVM cannot express one on the target, and a process that compiled one for
    one architecture cannot compile for another.

    Args:
      function: pickled: a function of a module, or a functools.partial of one.
      args: trees of jax.ShapeDtypeStruct without shardings.
      options: of `compile_for`, but for mesh.

    Raises:
      RuntimeError: the compiler took its process down.
    """
    arch = target.ptx_arch
    if arch not in _pools:
        _pools[arch] = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_hide_gpus)
    try:
        return _pools[arch].submit(_compile, function, args, target, options).result()
    except BrokenProcessPool as error:
        del _pools[arch]
        raise RuntimeError(f"compiling {getattr(function, '__name__', function)} for {target.name}: the compiler took "
                           "its process down; its message is on stderr") from error


def _hide_gpus() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX looks for devices


def _compile(function: Callable[..., Any], args: tuple[Any, ...], target: Target,
             options: dict[str, Any]) -> CompiledProgram:
    return replace(compile_for(function, *args, target=target, **options), compiled=None)
