"""Bytes that a program's kernels move, counted from the optimised HLO.

A kernel reads its operands once and writes its results once: what caches hide, and what they fail to hide, is not
seen. Where less is touched, less is counted:

- of an array that is only sliced or gathered from, the slices;
- of an array that is updated in place, the updates;
- of a paged cache that one of our own kernels takes, what the caller of `Traffic` says (`Paged`);
- of a GEMM's workspace, nothing.

The sums are lower bounds: of a conditional the branch that moves least counts, and a loop counts as often as it runs
where the compiler knows that, else (`Traffic.open_loops`) not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jaxserve.targets.hlo import UPDATES, VIEWS, Computation, Instruction
from jaxserve.targets.program import CompiledProgram, Kernel

_SLICES = {"slice", "dynamic-slice", "gather"}
_SAME_ELEMENTS = {*VIEWS, "reshape", "convert", "copy", "transpose"}


@dataclass(frozen=True)
class Paged:
    """What one of our kernels touches of a paged cache array: `read_bytes` if it attends, `written_bytes` if it fills
    slots."""

    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class Moved:
    """Bytes of one launch, or of several."""

    read_bytes: int = 0
    written_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.read_bytes + other.read_bytes, self.written_bytes + other.written_bytes)


class Traffic:
    """Bytes moved by each kernel of a program, and by all that run.

    Args:
      paged: of one of our own kernels and the label of an argument (`label`) that it takes: what it touches, or None
        if that is no paged cache.
    """

    def __init__(self, program: CompiledProgram, paged: Callable[[Kernel, str], Paged | None] | None = None):
        self._program, self._module = program, program.hlo
        self._paged = paged or (lambda kernel, argument: None)

    def of(self, kernel: Kernel) -> Moved:
        """Bytes of one launch."""
        instruction = self._module.instructions[kernel.instruction]
        if kernel.kind in ("pallas", "mosaic"):
            return self._of_own_kernel(kernel, instruction)
        if instruction.opcode == "fusion":
            return self._of_fusion(instruction)
        read = sum(_read_by(instruction, name) * operand.shapes[0].num_bytes // max(prod(operand.shapes[0].dims), 1)
                   for name, operand in self._operands(instruction))
        if instruction.opcode in UPDATES:
            return Moved(read, _updates_bytes(instruction))
        outputs = instruction.shapes
        if kernel.kind == "gemm":
            outputs = outputs[:1]  # the others are workspace
        elif instruction.opcode.endswith("-start"):
            outputs = outputs[-1:]  # the others are the operands again
        written = sum(shape.num_bytes for shape in outputs)
        if kernel.kind == "copy" and read:
            read = written = min(read, written)  # it may be only part of what the instruction does
        return Moved(read, written)

    def running(self) -> list[tuple[Kernel, int]]:
        """Each kernel that runs, and how often; 0 in open loops: see the module's docstring."""
        return list(self._running((), 1))

    @cached_property
    def total(self) -> Moved:
        """Bytes of everything that runs."""
        return sum((self.of(kernel) for kernel, times in self.running() for _ in range(times)), Moved())

    @cached_property
    def open_loops(self) -> dict[str, int]:
        """Loops of unknown length, by where they come from, and the kernels of each: the total is without them."""
        found: dict[str, int] = {}
        for kernel, times in self.running():
            if not times:
                loop = next(loop for loop in map(self._caller, kernel.within) if _rounds(loop) == 0)
                found[loop.op_name] = found.get(loop.op_name, 0) + 1
        return found

    def arguments(self, kernel: Kernel) -> list[str]:
        """Labels of the program's arguments that the kernel takes as they are, or as updated in place."""
        instruction = self._module.instructions[kernel.instruction]
        origins = [self._module.origin(operand) for _, operand in self._operands(instruction)]
        return [label(origin) for origin in origins if origin is not None]

    def copied(self, kernel: Kernel) -> list[str]:
        """Labels of the arguments, of two axes or more, that the kernel makes another array of: a copy, a transpose, a
        conversion; anything that reads all of it and yields as many elements. GEMMs and our own kernels never do."""
        if kernel.kind not in ("copy", "fusion", "other", "collective"):
            return []
        instruction = self._module.instructions[kernel.instruction]
        new = [prod(shape.dims) for index, shape in enumerate(instruction.shapes)
               if self._module.origin(instruction, index) is None]
        found = []
        for number, (name, operand) in enumerate(self._operands(instruction)):
            origin = self._module.origin(operand)
            if origin is None or len(origin.shapes[0].dims) < 2:
                continue
            elements = prod(origin.shapes[0].dims)
            read = self._elements_read(instruction, number, name)
            if 2 * read > elements and any(2 * made > elements for made in new):
                found.append(label(origin))
        return found

    def _of_own_kernel(self, kernel: Kernel, instruction: Instruction) -> Moved:
        read = written = 0
        for number, (_, operand) in enumerate(self._operands(instruction)):
            origin = self._module.origin(operand)
            paged = self._paged(kernel, label(origin)) if origin is not None else None
            if paged is None:
                read += operand.shapes[0].num_bytes
            elif number not in instruction.aliases:  # a kernel that only fills slots reads nothing
                read += paged.read_bytes
        for index, shape in enumerate(instruction.shapes):
            origin = self._module.origin(instruction, index)
            paged = self._paged(kernel, label(origin)) if origin is not None else None
            written += shape.num_bytes if paged is None else paged.written_bytes
        return Moved(read, written)

    def _of_fusion(self, instruction: Instruction) -> Moved:
        read = 0
        for number, (name, operand) in enumerate(self._operands(instruction)):
            shape = operand.shapes[0]
            elements = self._elements_read(instruction, number, name)
            read += elements * shape.num_bytes // max(prod(shape.dims), 1)
        computation = self._module.computations[instruction.called[0][1]]
        root = computation.root
        results = [computation.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return Moved(read, sum(_written(result, computation) for result in results))

    def _elements_read(self, instruction: Instruction, number: int, name: str) -> int:
        if instruction.opcode != "fusion":
            return _read_by(instruction, name)
        computation = self._module.computations[instruction.called[0][1]]
        return _read_within(computation, computation.parameters[number])

    def _operands(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        for name in instruction.operands:
            operand = instruction.computation.instructions.get(name)
            if operand is not None and operand.shapes:
                yield name, operand

    def _caller(self, step: str) -> Instruction:
        """Of a step of `Kernel.within`."""
        return self._module.instructions[step.split(":")[0]]

    def _running(self, within: tuple[str, ...], times: int) -> Iterator[tuple[Kernel, int]]:
        depth = len(within)
        seen: set[str] = set()
        for kernel in self._program.kernels:
            if kernel.within == within:
                yield kernel, times
            elif kernel.within[:depth] == within and len(kernel.within) > depth:
                caller = self._caller(kernel.within[depth])
                if caller.name not in seen:
                    seen.add(caller.name)
                    yield from self._around(within, caller, times)

    def _around(self, within: tuple[str, ...], caller: Instruction, times: int) -> Iterator[tuple[Kernel, int]]:
        inside = [list(self._running((*within, f"{caller.name}:{role}"), times * _rounds(caller)))
                  for role, _ in caller.called]
        if caller.opcode == "conditional":
            inside = [min(inside, key=lambda runs: (sum(self.of(run).num_bytes * n for run, n in runs), len(runs)))]
        for runs in inside:
            yield from runs


def _rounds(caller: Instruction) -> int:
    return 1 if caller.opcode == "conditional" else caller.trip_count or 0


def label(argument: Instruction) -> str:
    """JAX's name of an argument of the program, such as "state.caches[0][1]"."""
    return argument.op_name or argument.name


def _read_within(computation: Computation, value: Instruction) -> int:
    """Elements that the computation reads of a value of its own."""
    size = prod(value.shapes[0].dims) if value.shapes else 0
    if value is computation.root:
        return size
    total = 0
    for user in computation.users[value.name]:
        if user.opcode in _SAME_ELEMENTS:
            total += _read_within(computation, user)
        else:
            total += _read_by(user, value.name)
    return min(total, size)


def _read_by(user: Instruction, name: str) -> int:
    """Elements that an instruction reads of one operand."""
    size = prod(user.computation.instructions[name].shapes[0].dims)
    if user.operands[0] == name and user.operands.count(name) == 1:
        if user.opcode in _SLICES:
            return min(prod(user.shapes[0].dims), size)
        if user.opcode in UPDATES:
            return 0
    return size


def _written(result: Instruction, computation: Computation) -> int:
    """Bytes that a fusion writes for one of its results."""
    at = result
    while at.opcode in VIEWS:
        at = computation.instructions[at.operands[0]]
    if at.custom_call_target.startswith("__cublas"):
        return at.shapes[0].num_bytes  # the others are workspace
    return _updates_bytes(at) if at.opcode in UPDATES else result.num_bytes


def _updates_bytes(update: Instruction) -> int:
    # scatter(arrays..., indices, updates...), dynamic-update-slice(array, update, starts...)
    position = 1 if update.opcode == "dynamic-update-slice" else (len(update.operands) + 1) // 2
    updates = update.operands[position:position + 1] if position == 1 else update.operands[position:]
    return sum(update.computation.instructions[name].num_bytes for name in updates)
