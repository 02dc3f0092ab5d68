"""kv_write compiled for every generation of cards: one launch, in place, no spills."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import get_target
from pallas_kernels import kv_write
from tests.pallas_kernels.compiling import ARCHITECTURES, assert_no_spills, compile_kernel
from tests.pallas_kernels.covering import covering, grid

NUM_BLOCKS, NUM_KV_HEADS = 300, 2

CACHES: dict[str, tuple[Any, Any]] = {
    "float32": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
    "int8 by head": (jnp.int8, (NUM_KV_HEADS,)),
    "int8 by block": (jnp.int8, (NUM_BLOCKS, NUM_KV_HEADS)),
    "float8": (jnp.float8_e4m3fn, None),
    "float8 by block": (jnp.float8_e4m3fn, (NUM_BLOCKS, NUM_KV_HEADS)),
}

AXES: dict[str, Any] = {
    "target_name": list(ARCHITECTURES.values()),
    "width": [64, 80, 96, 128, 256],
    "cache": list(CACHES),
    "dtype": ["bfloat16", "float16", "float32"],
    "block_size": [16, 32],
    "num_tokens": [1, 33, 2048],
}


def name(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def check(record: Any, target_name: str, width: int, cache: str, dtype: str, block_size: int, num_tokens: int) -> None:
    cache_dtype, scale_shape = CACHES[cache]
    rows = jax.ShapeDtypeStruct((num_tokens, NUM_KV_HEADS, width), dtype)
    cache_shape = jax.ShapeDtypeStruct((NUM_BLOCKS, block_size, NUM_KV_HEADS, width), cache_dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    scale = scale_shape and jax.ShapeDtypeStruct(scale_shape, jnp.float32)
    device = get_target(target_name).mesh().devices.flat[0]

    def write(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, scales: Any) -> Any:
        run = functools.partial(kv_write, backend="triton", device=device)
        return run(k, v, k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1])

    args = (rows, rows, cache_shape, cache_shape, slots, (scale, scale))
    program = compile_kernel(write, *args, target_name=target_name, donate_argnums=(2, 3))
    assert [kernel.name for kernel in program.kernels] == ["kv_write"]
    assert program.memory.alias_bytes >= 2 * cache_shape.size * cache_shape.dtype.itemsize
    assert_no_spills(program, record)


@pytest.mark.parametrize("case", covering(AXES), ids=name)
def test_covering_set(case, record_property):
    check(record_property, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(AXES, ["target_name", "width", "cache", "block_size"]), ids=name)
def test_whole_grid(case, record_property):
    check(record_property, **case)


def test_undonated_caches_are_copied():
    """What the check for copies would see."""
    cache = jax.ShapeDtypeStruct((NUM_BLOCKS, 16, NUM_KV_HEADS, 64), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((3, NUM_KV_HEADS, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((3,), jnp.int32)
    write = functools.partial(kv_write, backend="triton", device=get_target("h200").mesh().devices.flat[0])
    program = compile_kernel(write, rows, rows, cache, cache, slots, target_name="h200")
    assert len(program.copies_of(cache.size * 2)) == 2
