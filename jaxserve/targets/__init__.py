"""NVIDIA GPUs to compile for, and what the compiler says of a program, on a machine that has none of them.

`compile_for` and `read_program` need the extra jaxserve[aot]; the descriptions alone need nothing.
"""

from jaxserve.targets.compiling import compile_for, lowering_for, read_program
from jaxserve.targets.isolated import compile_isolated
from jaxserve.targets.program import CompiledProgram, Kernel, Memory
from jaxserve.targets.ptxas import Resources, find_ptxas
from jaxserve.targets.target import TARGETS, Target, get_target

__all__ = ["TARGETS", "CompiledProgram", "Kernel", "Memory", "Resources", "Target", "compile_for", "compile_isolated",
           "find_ptxas", "get_target", "lowering_for", "read_program"]
