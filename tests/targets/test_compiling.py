"""Programs compiled for cards that are not there: kernels, copies, collectives, memory, resources, errors."""

import dataclasses
import os
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.targets import compile_for, compile_isolated, find_ptxas, get_target, lowering_for, read_program
from tests.pallas_kernels.compiling import assert_no_spills, compile_kernel
from tests.targets import kernels

H200 = get_target("h200")


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_kernels_of_a_small_program():
    program = compile_for(lambda x, w: jnp.tanh(x @ w), shape(64, 32), shape(32, 16), target=H200)
    assert [kernel.kind for kernel in program.kernels] == ["gemm", "fusion"]
    tanh = program.kernels[1]
    assert tanh.op_name.endswith("tanh")
    assert tanh.output_bytes == 64 * 16 * 4
    assert tanh.grid and tanh.threads
    assert tanh.grid[0] * tanh.threads[0] * 4 >= 64 * 16  # at most four elements a thread
    assert program.memory.argument_bytes == (64 * 32 + 32 * 16) * 4
    assert program.memory.output_bytes == 64 * 16 * 4
    assert program.compile_s > 0


@pytest.mark.parametrize("donated", [True, False])
def test_update_in_place_or_of_a_copy(donated):
    cache_bytes = 1000 * 64 * 4
    program = compile_for(lambda cache, rows, index: cache.at[index].set(rows), shape(1000, 64), shape(8, 64),
                          shape(8, dtype=jnp.int32), target=H200, donate_argnums=0 if donated else ())
    assert [kernel.output_bytes for kernel in program.copies] == ([] if donated else [cache_bytes])
    assert len(program.copies_of(cache_bytes)) == (not donated)
    assert program.memory.alias_bytes == (cache_bytes if donated else 0)


def test_all_reduce_over_eight_devices():
    mesh = H200.mesh(8)

    def split(*dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    args = split(16, 64, spec=(None, "tensor")), split(64, 32, spec=("tensor", None))

    def product(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec()))

    program = compile_for(product, *args, target=H200, mesh=mesh)
    assert [kernel.name for kernel in program.collectives] == ["kAllReduce"]
    assert program.memory.argument_bytes == (16 * 64 + 64 * 32) * 4 // 8
    with lowering_for(H200, mesh):
        lowered = jax.jit(product).lower(*args)
    assert read_program(lowered, H200).kernels == program.kernels


def test_loops_and_branches_are_told():
    def function(x, n):
        x = jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)
        return jax.lax.cond(n > 3, lambda x: x @ x, lambda x: jnp.sort(x) @ x, x)

    program = compile_for(function, shape(64, 64), shape(dtype=jnp.int32), target=H200)
    (sine,) = (kernel for kernel in program.kernels if kernel.op_name.endswith("sin"))
    assert [step.split(":")[1] for step in sine.within] == ["body"]
    products = [kernel.within for kernel in program.kernels if kernel.kind == "gemm"]
    assert [len(within) for within in products] == [1, 1]
    assert products[0] != products[1]


def test_pallas_kernel():
    program = compile_kernel(kernels.double, shape(64, 64), target_name="a100")
    (kernel,) = program.pallas_kernels
    assert (kernel.name, kernel.kind, kernel.grid, kernel.threads) == ("double", "pallas", (1, 1, 1), (128, 1, 1))
    assert_no_spills(program)
    resources = program.resources()
    if find_ptxas() is None:
        assert resources is None
    else:
        assert resources
        (used,) = resources
        assert used.kernel == "double"
        assert 64 * 64 / 128 <= used.registers <= 255  # a thread's share of the tile


def test_spills_are_seen():
    program = compile_kernel(kernels.double_in_one_warp, shape(64, 128), target_name="h200")
    if find_ptxas() is None:
        assert program.resources() is None
    else:
        with pytest.raises(AssertionError, match=r"on h200: .*double"):
            assert_no_spills(program)


def test_program_without_our_kernels_has_no_spills_to_deny():
    with pytest.raises(AssertionError, match="no Pallas kernel"):
        assert_no_spills(compile_kernel(jnp.sin, shape(64), target_name="h200"))


def test_shared_memory_of_the_card_is_the_limit():
    operands = shape(128, 256, dtype=jnp.bfloat16), shape(256, 256, dtype=jnp.bfloat16)
    (kernel,) = compile_for(kernels.matmul, *operands, target=H200).pallas_kernels
    assert get_target("l4").shared_memory_per_block_bytes < (kernel.shared_memory_bytes or 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED.*[Ss]hared memory"):
        compile_for(kernels.matmul, *operands, target=get_target("l4"))


def test_mosaic_kernel():
    program = compile_for(kernels.mosaic_double, shape(128, 64), target=H200)
    (kernel,) = program.pallas_kernels
    assert (kernel.name, kernel.kind, kernel.grid) == ("mosaic_kernel", "mosaic", (1, 1, 1))
    assert 128 * 64 * 4 <= (kernel.shared_memory_bytes or 0) < 128 * 64 * 4 + 1024
    assert_no_spills(program)
    # The second time Mosaic does not compile it again, nor tell of it.
    again = compile_for(lambda x: jnp.sin(kernels.mosaic_double(x)), shape(128, 64), target=H200)
    assert again.resources() == program.resources()
    small = dataclasses.replace(H200, shared_memory_per_block_bytes=32000)
    with pytest.raises(ValueError, match=r"mosaic_kernel: wants 32\d\d\d bytes of shared memory.*32000"):
        compile_for(kernels.mosaic_double, shape(128, 64), target=small)


def test_mosaic_kernel_for_two_architectures():
    """Mosaic compiles for one in a process, so the second goes to another."""
    compile_for(kernels.mosaic_double, shape(128, 64), target=H200)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        compile_for(kernels.mosaic_double, shape(128, 64), target=get_target("b200"))
    assert "use compile_isolated" in caught.value.__notes__[0]
    there = compile_kernel(kernels.mosaic_double, shape(128, 64), target_name="b200", isolated=True)
    assert ".target sm_100a" in there.ptx[0][1]
    assert_no_spills(there)


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = dict(os.environ)
    compile_for(jnp.sin, shape(64), target=H200)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == environment


def test_compilation_cache_is_left_alone(tmp_path):
    before = {name: getattr(jax.config, name) for name in (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        compile_for(lambda x: jnp.sin(x) + 1, shape(64), target=H200)
        assert list(tmp_path.iterdir()) == []
        jax.jit(lambda x: jnp.sin(x) + 2)(jnp.ones(64))  # and is still in use
        assert list(tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_isolated():
    """In one process after another: what one takes down the next survives."""
    here = compile_for(kernels.double, shape(64, 64), target=H200)
    there = compile_isolated(kernels.double, shape(64, 64), target=H200)
    assert there.compiled is None
    assert there.kernels == here.kernels
    assert there.resources() == here.resources()
    with pytest.raises(RuntimeError, match=r"abort for h200.*took its process down"):
        compile_isolated(kernels.abort, shape(64), target=H200)
    assert compile_isolated(kernels.double, shape(64, 64), target=H200).kernels == here.kernels
