"""Compiling JAX programs for a GPU that is not there.

    target = get_target("h200")
    program = compile_for(step, *shapes, target=target, donate_argnums=1)
    print(len(program.kernels), program.copies, program.memory.temp_bytes, program.resources())

XLA's GPU compiler runs on the CPU, for the card that the target describes. GEMMs are not autotuned this way, and XLA's
untuned tiles are absurd, so they are left to cuBLAS (`COMPILER_OPTIONS`).
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.targets import mosaic
from jaxserve.targets.program import CompiledProgram, read_dump
from jaxserve.targets.target import Target

COMPILER_OPTIONS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}
"""Of XLA, in every compile here unless the caller says otherwise."""


def compile_for(function: Callable[..., Any], *args: Any, target: Target, donate_argnums: int | Sequence[int] = (),
                mesh: Mesh | None = None, options: Mapping[str, Any] | None = None) -> CompiledProgram:
    """Compiles `function` for a card and reads what became of it.

    Args:
      function: traced by jax.jit.
      args: abstract or concrete arrays, or trees of them; only shapes, dtypes and shardings matter. Those without a
        sharding on a mesh are replicated.
      donate_argnums: as for jax.jit.
      mesh: of `target.mesh()`; by default one device.
      options: more options of XLA, or other values for `COMPILER_OPTIONS`.

    Raises:
      NotImplementedError: the compiler is not installed; or a kernel cannot be expressed for this card.
      jax.errors.JaxRuntimeError: XLA refuses, e.g. RESOURCE_EXHAUSTED where a kernel wants more shared memory than
        the card has.
      ValueError: a Mosaic kernel wants more shared memory than the card has (XLA does not see those).
    """
    mesh = mesh if mesh is not None else target.mesh()
    whole = NamedSharding(mesh, PartitionSpec())

    def on_mesh(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        keeps = isinstance(leaf, jax.ShapeDtypeStruct) and isinstance(sharding, NamedSharding)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if keeps else whole)

    with _dump_folder() as folder:
        with lowering_for(target, mesh):
            lowered = jax.jit(function, donate_argnums=donate_argnums).lower(*jax.tree.map(on_mesh, args))
        return _read(lowered, target, folder, options)


def read_program(lowered: jax.stages.Lowered, target: Target, *,
                 options: Mapping[str, Any] | None = None) -> CompiledProgram:
    """Compiles what was lowered on a mesh of the target, inside `lowering_for`; see `compile_for`."""
    with _dump_folder() as folder:
        return _read(lowered, target, folder, options)


def compile_lowered(lowered: jax.stages.Lowered, target: Target, *,
                    options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """The executable alone, of what was lowered on a mesh of the target; raises as `compile_for`."""
    with mosaic.told_of(target), _no_compilation_cache():
        try:
            return lowered.compile(compiler_options={**COMPILER_OPTIONS, **(options or {})})
        except jax.errors.JaxRuntimeError as error:
            mosaic.explain(error, target)
            raise


@contextlib.contextmanager
def lowering_for(target: Target, mesh: Mesh) -> Iterator[None]:
    """Pallas kernels that are lowered inside are for this card: they would ask the machine's own devices otherwise."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mosaic.told_of(target))
        if jax.__version_info__ >= (0, 11):
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        yield


def _read(lowered: jax.stages.Lowered, target: Target, folder: Path,
          options: Mapping[str, Any] | None) -> CompiledProgram:
    # Only JAX 0.12 needs the third to write PTX; all kinds of intermediate files would take 15 s more.
    dumps: dict[str, Any] = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}
    start = time.monotonic()
    compiled = compile_lowered(lowered, target, options={**(options or {}), **dumps})
    compile_s = time.monotonic() - start
    program = read_dump(folder, compiled, target, compile_s)
    for kernel in program.pallas_kernels:
        if (kernel.shared_memory_bytes or 0) > target.shared_memory_per_block_bytes:
            raise ValueError(f"kernel {kernel.name}: wants {kernel.shared_memory_bytes} bytes of shared memory, but "
                             f"{target.name} has {target.shared_memory_per_block_bytes} per block")
    return program


@contextlib.contextmanager
def _dump_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder, mosaic.dumping_to(folder):
        yield Path(folder)


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """JAX's persistent cache would write these programs, and fail to read them back without a GPU."""
    if not jax.config.jax_enable_compilation_cache or not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides once per process whether it uses the cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
