"""Mosaic GPU's ways when no GPU is there: what it must be told, and what it tells of the kernels it compiled.

Two things are remembered for the life of the process, because Mosaic's compiler does so too: it compiles a kernel only
once, and it stays with the architecture that it first compiled for (the second is another reason for
`compile_isolated`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from jaxserve.targets.hlo import Instruction, Module
from jaxserve.targets.target import Target

_LAUNCH = re.compile(r"gpu\.launch async.*?blocks\([^)]*\) in \(([^)]*)\) threads\([^)]*\) in \(([^)]*)\)"
                     r" dynamic_shared_memory_size %c(\d+)_i32")


@dataclass(frozen=True)
class MosaicKernel:
    """What Mosaic wrote of a kernel, or of all kernels with its name.

    Attributes:
      launch: grid, threads and shared_memory_bytes, of the one that takes most shared memory.
      ptx: a module each.
    """

    name: str
    launch: dict[str, Any]
    ptx: tuple[str, ...]


_known: dict[str, MosaicKernel] = {}
_first_arch: list[str] = []


def is_mosaic(instruction: Instruction) -> bool:
    return instruction.custom_call_target.startswith("mosaic_gpu")


@contextlib.contextmanager
def told_of(target: Target) -> Iterator[None]:
    """Mosaic takes every device that is not there for a 9.0; it looks the capability up in a private function."""
    module = "jax.experimental.mosaic.gpu." + ("utils" if jax.__version_info__ >= (0, 11) else "core")
    try:
        owner = import_module(module)
    except ImportError:  # a JAX without Mosaic has no kernels for it either
        yield
        return
    with mock.patch.object(owner, "_infer_arch", lambda: target.compute_capability):
        yield


def dumping_to(folder: str) -> Any:
    """A context in which Mosaic writes its PTX and a log of its passes; it learns of them by its environment."""
    return mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder, MOSAIC_GPU_DUMP_PTX="1")


def explain(error: Exception, target: Target) -> None:
    """Adds a note where the error may come from the process, not from the kernel."""
    if "pass pipeline failed" not in str(error).lower():
        return
    if not _first_arch:
        _first_arch.append(target.ptx_arch)
    elif _first_arch[0] != target.ptx_arch:
        error.add_note(f"Mosaic compiled for {_first_arch[0]} in this process before and cannot compile for "
                       f"{target.ptx_arch} any more: use compile_isolated")


def read_kernels(folder: Path, module: Module, target: Target) -> dict[str, MosaicKernel]:
    """Instruction -> its kernel, from what was dumped now or when this process met the same kernel before."""
    calls = {call.name: (_name(call), _hash(call)) for call in module.instructions.values() if is_mosaic(call)}
    if calls and not _first_arch:
        _first_arch.append(target.ptx_arch)
    new = {name for name, key in calls.values() if key not in _known}
    for name in new:
        made = MosaicKernel(name, *_dumped(folder, name))
        _known.update((key, made) for other, key in calls.values() if other == name and key not in _known)
    return {instruction: _known[key] for instruction, (_, key) in calls.items()}


def _name(call: Instruction) -> str:
    """The last step but one of the path to the operation."""
    return call.op_name.split("/")[-2]


def _hash(call: Instruction) -> str:
    match = re.search(r'kernel_hash = "([^"]*)"', call.attributes)
    assert match, f"{call.name} has no kernel_hash"
    return match[1]


def _dumped(folder: Path, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Mosaic writes name_0.ptx and name_0.mlir-passes.log, name_1..., one pair for each kernel of the name."""
    launches: list[dict[str, Any]] = []
    for file in folder.glob("*.mlir-passes.log"):
        match = _LAUNCH.search(file.read_text(errors="replace")) if _unnumbered(file) == name else None
        if match:
            grid, threads = (tuple(int(size) for size in re.findall(r"= %c(\d+)", sizes))
                             for sizes in match.group(1, 2))
            launches.append(dict(grid=grid, threads=threads, shared_memory_bytes=int(match[3])))
    modules = {file.read_text(errors="replace") for file in folder.glob("*.ptx") if _unnumbered(file) == name}
    most = max(launches, key=lambda launch: launch["shared_memory_bytes"], default={})
    return most, tuple(sorted(modules))


def _unnumbered(file: Path) -> str:
    return file.name.split(".")[0].rsplit("_", 1)[0]
