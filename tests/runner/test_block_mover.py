"""Blocks come back from host memory as they went, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.parallel import TENSOR
from jaxserve.runner.block_mover import MOST_AHEAD, BlockMover, _set, _take
from jaxserve.runner.kv_cache import CacheSpec, parts
from jaxserve.runner.state import abstract_state
from jaxserve.scheduling.move_costs import MOVE_BATCH
from jaxserve.scheduling.plan import StepPlan
from jaxserve.targets import compile_for, get_target
from tests.engine.compilations import count_compilations

NUM_BLOCKS = 2 * (MOST_AHEAD + 2) * MOVE_BATCH


def made(dtype: str, num_devices: int, compress: bool) -> tuple[BlockMover, Any, list[np.ndarray]]:
    """A mover, caches of random numbers, and their bytes: [B, P, K, H, bytes] for each layer's keys and values."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), (TENSOR,))
    spec = CacheSpec(num_layers=3, num_blocks=NUM_BLOCKS, block_size=4, num_kv_heads=2, head_dim=8,
                     dtype=jnp.dtype(dtype))
    state = abstract_state(spec, 1, 8, mesh)
    draw = np.random.default_rng(0)
    content: list[np.ndarray] = []

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.ndim == 1:  # an int8 cache's scale
            return jax.device_put(jnp.full(leaf.shape, 0.5, leaf.dtype), leaf.sharding)
        numbers = (draw.standard_normal(leaf.shape) * 30).astype(leaf.dtype)
        content.append(numbers[..., None].view(np.uint8))
        return jax.device_put(numbers, leaf.sharding)

    caches = jax.tree.map(fill, state.caches)
    blueprint: Any = SimpleNamespace(cache=spec, mesh=mesh, state=state)
    return BlockMover(blueprint, compress=compress), caches, content


def held(caches: Any) -> list[np.ndarray]:
    found = [np.asarray(parts(cache)[0]) for layer in caches for cache in layer]
    return [array[..., None].view(np.uint8) for array in found]


def check_round_trip(dtype: str, num_devices: int, compress: bool) -> None:
    """Half of the blocks go to the host, are overwritten, and come back elsewhere, in another order."""
    mover, caches, content = made(dtype, num_devices, compress)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, caches)
    half = NUM_BLOCKS // 2 - 3  # no whole batches
    out = [(1 + i, 1 + i) for i in range(half)]
    caches = mover.run(caches, StepPlan(swap_out=out))
    caches = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if leaf.ndim == 4 else leaf, caches)
    back = [(NUM_BLOCKS - 1 - i, 1 + i) for i in range(half)]
    caches = mover.run(caches, StepPlan(swap_in=back))
    for now, before in zip(held(caches), content, strict=True):
        for (device_block, host_block) in back:
            np.testing.assert_array_equal(now[device_block], before[host_block])
        assert not now[1 : NUM_BLOCKS - half].any(), "others were touched"
    assert jax.tree.map(lambda leaf: leaf.sharding, caches) == shardings
    mover.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_round_trip(dtype: str, compress: bool) -> None:
    check_round_trip(dtype, 1, compress)


def test_a_round_trip_over_two_devices() -> None:
    code = ("from tests.runner.test_block_mover import check_round_trip as check\n"
            "for compress in (False, True): check('bfloat16', 2, compress); check('int8', 2, compress)")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)


def test_copies_out_come_first_and_in_order() -> None:
    """A block is copied out and in again within one plan, and one host block gets the later of two contents."""
    mover, caches, content = made("float32", 1, False)
    caches = mover.run(caches, StepPlan(swap_out=[(5, 1), (6, 2), (7, 1)], swap_in=[(6, 1), (5, 2)]))
    for now, before in zip(held(caches), content, strict=True):
        np.testing.assert_array_equal(now[6], before[7])
        np.testing.assert_array_equal(now[5], before[6])
        np.testing.assert_array_equal(now[7], before[7])


def test_what_lies_on_the_host_is_not_the_device_s_memory() -> None:
    """Later steps write into donated caches; the copy must not change with them."""
    mover, caches, content = made("float32", 1, False)
    caches = mover.run(caches, StepPlan(swap_out=[(3, 1)]))
    overwrite = jax.jit(lambda caches: jax.tree.map(lambda leaf: leaf.at[3].set(0.0), caches), donate_argnums=0)
    caches = mover.run(overwrite(caches), StepPlan(swap_in=[(4, 1)]))
    for now, before in zip(held(caches), content, strict=True):
        assert not now[3].any()
        np.testing.assert_array_equal(now[4], before[3])


@pytest.mark.parametrize("compress", [False, True])
def test_after_warm_up_no_number_of_blocks_compiles_anything(compress: bool) -> None:
    mover, caches, content = made("float32", 1, compress)
    caches = mover.warm_up(caches)
    with count_compilations() as counts:
        for count in (1, MOVE_BATCH - 1, MOVE_BATCH, MOVE_BATCH + 1, 3 * MOVE_BATCH):
            moves = [(1 + i, 1 + i) for i in range(count)]
            caches = mover.run(caches, StepPlan(swap_out=moves, swap_in=moves))
    assert not counts
    for now, before in zip(held(caches), content, strict=True):
        np.testing.assert_array_equal(now[1:], before[1:])


def test_compression_is_measured() -> None:
    mover, caches, _ = made("float32", 1, True)
    moves = [(1, 1), (2, 2)]
    mover.run(caches, StepPlan(swap_out=moves))
    mover.host.wait([1, 2])
    of_random = mover.host.compression_ratio
    assert 0.8 < of_random < 1.3, "random numbers hardly get smaller"
    zeros = jax.tree.map(lambda leaf: leaf * 0, caches)
    for _ in range(9):
        mover.run(zeros, StepPlan(swap_out=moves))
    mover.host.wait([1, 2])
    assert mover.host.compression_ratio > 3


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_on_a_gpu_blocks_go_into_the_caches_in_place(dtype: str) -> None:
    """Compiled for an H200: no copy of a cache, and temporaries of about the blocks that are moved."""
    target = get_target("h200")
    cache = jax.ShapeDtypeStruct((512, 16, 8, 128), dtype)
    caches = ((cache, cache),) * 4
    block = jax.ShapeDtypeStruct((8, 16, 8, 128), dtype)
    ids = jax.ShapeDtypeStruct((MOVE_BATCH,), jnp.int32)
    cache_bytes, moved_bytes = cache.size * cache.dtype.itemsize, MOVE_BATCH * block.size * block.dtype.itemsize
    into = compile_for(_set, caches, ids, [block] * MOVE_BATCH, target=target, donate_argnums=0)
    assert into.memory.alias_bytes == 8 * cache_bytes and not into.copies_of(cache_bytes)
    assert into.memory.temp_bytes < 2 * moved_bytes
    out = compile_for(_take, caches, ids, target=target)
    assert not out.copies_of(cache_bytes) and out.memory.temp_bytes < 2 * moved_bytes
    print(f"{dtype}: {len(into.kernels)} kernels in, {len(out.kernels)} out, for 4 layers")
