"""What the kernels' compile tests share: a kernel compiled for a card that is not there, and its spills."""

from collections.abc import Callable
from typing import Any

from jaxserve.targets import CompiledProgram, compile_for, compile_isolated, find_ptxas, get_target

ARCHITECTURES = {"8.0": "a100", "8.6": "a10g", "8.9": "l4", "9.0": "h200", "10.0": "b200"}
"""One card of each compute capability."""


def compile_kernel(function: Any, *args: Any, target_name: str, isolated: bool = False,
                   **options: Any) -> CompiledProgram:
    """Args: jax.ShapeDtypeStructs. isolated: in a process that the compiler may abort."""
    compile_it = compile_isolated if isolated else compile_for
    return compile_it(function, *args, target=get_target(target_name), **options)


def assert_no_spills(program: CompiledProgram, record: Callable[[str, object], None] | None = None) -> None:
    """Holds where ptxas is at hand; that there is a Pallas kernel at all is always checked.

    Args:
        record: the fixture record_property; what the kernels take then goes into the table of conftest.py.
    """
    names = {kernel.name for kernel in program.pallas_kernels}
    assert names, f"no Pallas kernel among {[kernel.name for kernel in program.kernels]}"
    resources = program.resources()
    if resources is None:
        assert find_ptxas() is None
        return
    assert {used.kernel for used in resources} == names
    mosaic = {kernel.name for kernel in program.pallas_kernels if kernel.kind == "mosaic"}
    architecture = "{}.{}".format(*program.target.compute_capability)
    for used in resources:
        name = used.kernel + " (mosaic)" * (used.kernel in mosaic)
        if record is not None:
            record("kernel", [name, architecture, used.registers, used.spill_bytes, used.shared_memory_bytes])
    spilled = [used for used in resources if used.spill_bytes]
    assert not spilled, f"on {program.target.name}: {spilled}"
