"""Registers, spills and shared memory of kernels, by NVIDIA's assembler where it is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '\w+'.*?"
                    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
                    r"Used (\d+) registers([^\n]*)", re.DOTALL)
_NEWEST = re.compile(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
      kernel: its name.
      registers: per thread.
      spill_bytes: per thread, what does not fit into registers (stores and loads together).
      stack_bytes: per thread.
      shared_memory_bytes: per block, static and dynamic.
    """

    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_memory_bytes: int


def find_ptxas() -> str | None:
    """Path of ptxas: on the PATH, in CUDA_HOME, or from the package nvidia-cuda-nvcc-cu12; None if nowhere."""
    places = [Path(sysconfig.get_path("purelib"), "nvidia", "cuda_nvcc", "bin")]
    if "CUDA_HOME" in os.environ:
        places.insert(0, Path(os.environ["CUDA_HOME"], "bin"))
    return shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(map(str, places)))


def assemble(ptx: str, arch: str) -> list[Resources]:
    """Resources of every kernel in a PTX module; shared memory is only what the module declares itself.

    Args:
      arch: "sm_90a" and the like.

    Raises:
      RuntimeError: ptxas refuses the module; the message has its reason.
    """
    ptxas = find_ptxas()
    assert ptxas is not None, "ask find_ptxas first"
    return list(_assemble(ptx, arch, ptxas))


@cache  # the same kernel is in every layer, and in many tests
def _assemble(ptx: str, arch: str, ptxas: str) -> tuple[Resources, ...]:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [ptxas, "-v", f"-arch={arch}", source.name, "-o", os.devnull]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode:
        newest = _NEWEST.search(output)
        if newest is None:
            raise RuntimeError(f"ptxas for {arch} failed: {output.strip()[:2000]}")
        # A newer compiler declares a newer language than it uses.
        return _assemble(re.sub(r"(?m)^\.version .*$", f".version {newest[1]}", ptx), arch, ptxas)
    found = []
    for kernel, stack, stores, loads, registers, rest in _ENTRY.findall(output):
        shared = re.search(r"(\d+) bytes smem", rest)
        found.append(Resources(kernel, int(registers), int(stores) + int(loads), int(stack),
                               int(shared[1]) if shared else 0))
    return tuple(found)
