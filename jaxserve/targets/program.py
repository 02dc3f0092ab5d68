"""What the compiler made of a program: the kernels it launches, its copies, its collectives, its memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from jaxserve.targets.hlo import Instruction, Module
from jaxserve.targets.mosaic import MosaicKernel, is_mosaic, read_kernels
from jaxserve.targets.ptxas import Resources, assemble, find_ptxas
from jaxserve.targets.target import Target

KernelKind = Literal["fusion", "pallas", "mosaic", "gemm", "collective", "copy", "other"]

_COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "CollectivePermute", "CollectiveBroadcast")
_NOT_LAUNCHED = {"kWhile", "kConditional", "kSequential", "kCommandBuffer", "kAsyncStart", "kAsyncDone",
                 "kDynamicSlice", "kDynamicSliceFusion", "kWaitForStreams", "kPartitionId", "kReplicaId"}
_THUNK = re.compile(r"^( *)(\d+): (k\w+)\s+\[[^\]]*\]\s*(.*)$")
_LAUNCH = re.compile(r"^(\S+) grid: \[([^\]]*)\] threads: \[([^\]]*)\]\s+shared_memory: (\d+) bytes")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')


@dataclass(frozen=True)
class Kernel:
    """One launch in the program's order.

    Attributes:
      name: the kernel's own, or that of the library's call.
      kind: "fusion" is XLA's own code; "pallas" comes from Pallas through Triton, "mosaic" through Mosaic GPU; "gemm"
        is a call of cuBLAS; "copy" is a plain copy or fill of device memory; "other" is any other library call.
      instruction: of the optimised HLO.
      op_name: where in the traced program it comes from.
      within: the loops and conditionals around it, outermost first, such as "while.8:body".
      output_bytes: size of what the instruction yields; of a copy, the bytes that it copies.
      grid, threads: of the launch, None if a library chooses.
      shared_memory_bytes: dynamic, per block.
    """

    name: str
    kind: KernelKind
    instruction: str
    op_name: str
    within: tuple[str, ...]
    output_bytes: int
    grid: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    shared_memory_bytes: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes per device, by the compiler's own account.

    Attributes:
      alias_bytes: of the outputs that are donated arguments, counted in both.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int


@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for a card.

    Attributes:
      compiled: JAX's executable; None if it was compiled in another process.
      kernels: every launch; those in loops and in branches once each.
      compile_s: seconds that XLA took.
      hlo_text: the optimised program.
      ptx: (name, PTX module) of each Pallas kernel; Mosaic kernels that differ may share a name.
    """

    target: Target
    compiled: Any
    kernels: list[Kernel]
    memory: Memory
    compile_s: float
    hlo_text: str = field(repr=False)
    ptx: list[tuple[str, str]] = field(repr=False)

    @property
    def copies(self) -> list[Kernel]:
        """Plain copies of device memory, scalars' too."""
        return [kernel for kernel in self.kernels if kernel.kind == "copy"]

    @property
    def collectives(self) -> list[Kernel]:
        """All-reduces, all-gathers and the like, in order."""
        return [kernel for kernel in self.kernels if kernel.kind == "collective"]

    @property
    def pallas_kernels(self) -> list[Kernel]:
        """Launches of our own kernels, through either lowering."""
        return [kernel for kernel in self.kernels if kernel.kind in ("pallas", "mosaic")]

    def copies_of(self, num_bytes: int) -> list[Kernel]:
        """Copies of at least that much: with the size of one cache array, the copies of the cache."""
        return [kernel for kernel in self.copies if kernel.output_bytes >= num_bytes]

    @cached_property
    def hlo(self) -> Module:
        """The optimised program, parsed."""
        return Module(self.hlo_text)

    def resources(self) -> list[Resources] | None:
        """Registers, spills and shared memory of each Pallas kernel; None where ptxas is not installed.

        Raises:
          RuntimeError: ptxas refuses a kernel.
        """
        if find_ptxas() is None:
            return None
        dynamic = {kernel.name: kernel.shared_memory_bytes or 0 for kernel in self.pallas_kernels}
        return [replace(used, kernel=name, shared_memory_bytes=used.shared_memory_bytes + dynamic[name])
                for name, text in self.ptx for used in assemble(text, self.target.ptx_arch)]


def read_dump(folder: Path, compiled: Any, target: Target, compile_s: float) -> CompiledProgram:
    """The program, from what XLA and Mosaic wrote into `folder` while they compiled it."""
    text = compiled.as_text()
    module = Module(text)
    mosaic = read_kernels(folder, module, target)
    kernels = list(_kernels(folder, module, mosaic))
    analysis = compiled.memory_analysis()
    memory = Memory(analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.alias_size_in_bytes,
                    analysis.temp_size_in_bytes)
    ptx = _ptx(folder, {kernel.name for kernel in kernels if kernel.kind == "pallas"})
    ptx += [(kernel.name, text) for kernel in mosaic.values() for text in kernel.ptx]
    return CompiledProgram(target, compiled, kernels, memory, compile_s, text, list(dict.fromkeys(ptx)))


def _kernels(folder: Path, module: Module, mosaic: dict[str, MosaicKernel]) -> Iterator[Kernel]:
    for thunk, text, instruction in _thunks(folder, module):
        if thunk in _NOT_LAUNCHED:
            continue
        name, launch = _launch(text)
        kind = _kind(thunk, instruction)
        if kind == "mosaic":
            name, launch = mosaic[instruction.name].name, mosaic[instruction.name].launch
        elif kind in ("gemm", "collective", "copy"):
            name = thunk
        within = tuple(f"{caller.name}:{role}" for role, caller in module.enclosing(instruction)
                       if caller.opcode in ("while", "conditional"))[::-1]
        yield Kernel(name, kind, instruction.name, instruction.op_name, within, instruction.num_bytes, **launch)


def _thunks(folder: Path, module: Module) -> Iterator[tuple[str, str, Instruction]]:
    """(kind, the rest of the line, instruction) of each line of the thunk sequence.

    What is inside an asynchronous or a slicing thunk may have no instruction of its own in the text: it has that of the
    thunk around it, by indentation.
    """
    names = {int(number): name for name, number in _METADATA.findall(_only(folder, "thunk_metadata"))}
    around: list[tuple[int, Instruction]] = []
    for line in _only(folder, "thunk_sequence").splitlines():
        if match := _THUNK.match(line):
            indent = len(match[1])
            while around and around[-1][0] >= indent:
                around.pop()
            instruction = module.instructions.get(names.get(int(match[2]), "")) or around[-1][1]
            around.append((indent, instruction))
            yield match[3], match[4], instruction


def _only(folder: Path, what: str) -> str:
    files = list(folder.glob(f"*.{what}.txt"))
    assert len(files) == 1, f"XLA wrote {len(files)} files *.{what}.txt, not one"
    return files[0].read_text()


def _launch(text: str) -> tuple[str, dict[str, Any]]:
    match = _LAUNCH.match(text)
    if match is None:
        return text.strip(), {}
    grid, threads = (tuple(int(size) for size in sizes.split(",")) for sizes in match.group(2, 3))
    return match[1], dict(grid=grid, threads=threads, shared_memory_bytes=int(match[4]))


def _kind(thunk: str, instruction: Instruction) -> KernelKind:
    if "Copy" in thunk or thunk.startswith("kMem"):
        return "copy"
    if "Gemm" in thunk or "Matmul" in thunk:
        return "gemm"
    if any(name in thunk for name in _COLLECTIVES):
        return "collective"
    if is_mosaic(instruction):
        return "mosaic"
    if thunk in ("kCustomKernel", "kKernel"):
        return "pallas" if "triton" in instruction.custom_call_target else "fusion"
    return "other"


def _ptx(folder: Path, names: set[str]) -> list[tuple[str, str]]:
    """(kernel, module) from the files that have one of these kernels as an entry."""
    texts = [file.read_text(errors="replace") for file in sorted(folder.glob("*.ptx"))]
    return [(entry, text) for text in texts for entry in re.findall(r"\.entry (\w+)\(", text) if entry in names]
