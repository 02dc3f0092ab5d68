"""Reading XLA's optimised HLO text: which instruction calls what, where its operands come from, how large they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|true_computation|false_computation|branch_computations)="
                     r"(\{[^}]*\}|%?[\w.\-]+)")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")

VIEWS = {"bitcast", "opt-barrier", "async-done", "fusion-done", "custom-call-done"}
UPDATES = {"scatter", "dynamic-update-slice"}


@dataclass(frozen=True)
class Shape:
    """One array: dtype as HLO names it, sizes of its axes."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)  # bf16, s4, f8e4m3fn; pred has none
        return -(-prod(self.dims) * (int(digits[0]) if digits else 8) // 8)


@dataclass
class Instruction:
    """One line of HLO.

    Attributes:
      shapes: of its result; more than one if that is a tuple.
      attributes: the text behind its operands.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    computation: Computation = field(repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from, e.g. "jit(f)/attention/dot_general"; "" if nowhere."""
        return self._quoted("op_name")

    @property
    def custom_call_target(self) -> str:
        return self._quoted("custom_call_target")

    @property
    def index(self) -> int:
        """Of a get-tuple-element, or a parameter's number."""
        if self.opcode == "parameter":
            return int(self.operands[0])
        match = re.search(r"\bindex=(\d+)", self.attributes)
        assert match, self.name
        return int(match[1])

    @cached_property
    def called(self) -> list[tuple[str, str]]:
        """(role, name) of the computations it calls; roles are HLO's attribute names, or branch_0, branch_1, ..."""
        found = []
        for role, text in _CALLED.findall(self.attributes):
            names = [name.strip().lstrip("%") for name in text.strip("{}").split(",")]
            if role == "branch_computations":
                found += [(f"branch_{index}", name) for index, name in enumerate(names)]
            else:
                found += [(role, name) for name in names]
        return found

    @cached_property
    def aliases(self) -> dict[int, int]:
        """Operand -> output that takes its place in memory (custom calls)."""
        listed = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        return {int(operand): int(output or 0) for output, operand in _ALIAS.findall(listed[1])} if listed else {}

    @property
    def trip_count(self) -> int | None:
        """Of a loop, where the compiler knows it."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    def _quoted(self, key: str) -> str:
        match = re.search(rf'\b{key}="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclass
class Computation:
    """A function of HLO; instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def root(self) -> Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [instruction for instruction in self.instructions.values() if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: parameter.index)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands):
                if operand in found:
                    found[operand].append(instruction)
        return found


class Module:
    """A whole program, from the text of `jax.stages.Compiled.as_text()`."""

    def __init__(self, text: str):
        self.computations = {computation.name: computation for computation in _computations(text)}
        names = re.findall(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
        self.entry = self.computations[names[0]]
        self.instructions = {name: instruction for computation in self.computations.values()
                             for name, instruction in computation.instructions.items()}

    @cached_property
    def callers(self) -> dict[str, tuple[str, Instruction]]:
        """Computation -> (role, the instruction that calls it)."""
        return {name: (role, instruction) for instruction in self.instructions.values()
                for role, name in instruction.called}

    def enclosing(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """(role, loop or conditional) around an instruction, innermost first."""
        name = instruction.computation.name
        while name in self.callers:
            role, caller = self.callers[name]
            yield role, caller
            name = caller.computation.name

    def origin(self, instruction: Instruction, index: int = 0) -> Instruction | None:
        """The program's argument whose memory this value is: untouched, or updated in place; None if it is new.

        Follows views, tuples, updates in place, and what goes around loops unchanged into them.

        Args:
          index: which array, of a tuple.
        """
        place: tuple[Instruction, int] | None = instruction, index
        for _ in range(10 * len(self.instructions)):  # a chain never comes back to where it was
            if place is None or (place[0].opcode == "parameter" and place[0].computation is self.entry):
                break
            place = self._source(*place)
        return place[0] if place is not None else None

    def _source(self, instruction: Instruction, index: int) -> tuple[Instruction, int] | None:
        """One step back to where an array's memory comes from."""
        def operand(number: int) -> Instruction:
            return instruction.computation.instructions[instruction.operands[number]]

        if instruction.opcode == "parameter":
            outer = self._argument(instruction)
            return None if outer is None else (outer, index)
        if instruction.opcode == "get-tuple-element":
            return operand(0), instruction.index
        if instruction.opcode == "tuple":
            return operand(index), 0
        if instruction.opcode == "while" or instruction.opcode in VIEWS:
            return operand(0), index
        if instruction.opcode in UPDATES:
            return operand(index), 0
        if instruction.opcode == "async-start":
            return self.computations[instruction.called[0][1]].root, index
        if instruction.opcode == "fusion":
            number = self._updated_operand(instruction, index)
            return None if number is None else (operand(number), 0)
        aliased = [number for number, output in instruction.aliases.items() if output == index]
        return (operand(aliased[0]), 0) if aliased else None

    def _updated_operand(self, fusion: Instruction, index: int) -> int | None:
        """Which operand's memory the fusion's output takes over; None if that is new memory."""
        computation = self.computations[fusion.called[0][1]]
        at: Instruction = computation.root
        if at.opcode == "tuple":
            at = computation.instructions[at.operands[index]]
        is_update = False
        while at.opcode in VIEWS or at.opcode in UPDATES:
            is_update |= at.opcode in UPDATES
            at = computation.instructions[at.operands[0]]
        return at.index if is_update and at.opcode == "parameter" else None

    def _argument(self, parameter: Instruction) -> Instruction | None:
        if parameter.computation.name not in self.callers:
            return None
        role, caller = self.callers[parameter.computation.name]
        if caller.opcode == "while":
            position = 0
        elif caller.opcode == "conditional":
            position = 1 + [name for _, name in caller.called].index(parameter.computation.name)
        elif role == "to_apply" and caller.opcode != "call":
            return None
        else:
            position = parameter.index
        return caller.computation.instructions.get(caller.operands[position])


def _computations(text: str) -> Iterator[Computation]:
    computation: Computation | None = None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            computation = Computation(match[2])
        elif line.startswith("}") and computation is not None:
            yield computation
            computation = None
        elif computation is not None and (match := _INSTRUCTION.match(line)):
            instruction = _instruction(match[2], match[3], computation, is_root=bool(match[1]))
            computation.instructions[instruction.name] = instruction


def _instruction(name: str, text: str, computation: Computation, *, is_root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes = tuple(Shape(dtype, tuple(int(dim) for dim in dims.split(",") if dim))
                   for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", text[:end])))
    opcode, rest = text[end:].lstrip().split("(", 1)
    close = _closing("(" + rest, 0) - 1
    inside = re.sub(r"/\*.*?\*/", "", rest[:close])
    if opcode in ("parameter", "constant"):
        operands: tuple[str, ...] = (inside,)
    else:
        # With or without their types in front, operands end in their names.
        operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
            part.split()[-1] for part in inside.split(",") if part.strip())
    if opcode in ("fusion-start", "custom-call-start"):  # their result is ((operands), results, context)
        opcode, shapes = opcode.removesuffix("-start"), shapes[len(operands):-1]
    return Instruction(name, opcode, shapes, operands, rest[close + 1:], is_root, computation)


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "(":
            depth += 1
        elif text[position] == ")":
            depth -= 1
            if depth == 0:
                return position
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")
