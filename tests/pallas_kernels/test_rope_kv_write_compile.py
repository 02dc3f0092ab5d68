"""rope_kv_write compiled for every generation of cards: one launch, in place, no spills."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import get_target
from pallas_kernels.rope_kv_write import rope_kv_write
from tests.pallas_kernels.compiling import ARCHITECTURES, assert_no_spills, compile_kernel
from tests.pallas_kernels.covering import covering, grid
from tests.pallas_kernels.test_kv_write_compile import CACHES, NUM_BLOCKS, NUM_KV_HEADS, name

AXES: dict[str, Any] = {
    "target_name": list(ARCHITECTURES.values()),
    "width": [64, 80, 96, 128, 256],
    "group": [1, 4, 6, 7, 8, 16],
    "block_size": [16, 32],
    "cache": list(CACHES),
    "dtype": ["bfloat16", "float16", "float32"],
    "pairs": [("half", 1), ("interleaved", 1), ("half", 2), ("interleaved", 2)],  # layout; one lane in so many turns
    "norm": [True, False],
    "num_tokens": [1, 33, 2048],
}


def check(record: Any, target_name: str, width: int, group: int, block_size: int, cache: str, dtype: str,
          pairs: tuple[Any, int], norm: bool, num_tokens: int) -> None:
    cache_dtype, scale_shape = CACHES[cache]
    layout, part = pairs
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    qkv = jax.ShapeDtypeStruct((num_tokens, NUM_KV_HEADS, group + 2, width), dtype)
    cosine = shape((num_tokens, width // 2 // part))
    cache_shape = jax.ShapeDtypeStruct((NUM_BLOCKS, block_size, NUM_KV_HEADS, width), cache_dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    scale, weight = scale_shape and shape(scale_shape), jax.ShapeDtypeStruct((width,), dtype) if norm else None
    device = get_target(target_name).mesh().devices.flat[0]

    def run(qkv: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, slots: Any, scales: Any, norms: Any) -> Any:
        write = functools.partial(rope_kv_write, pair_layout=layout, backend="triton", device=device)
        return write(qkv, cos, sin, k_cache, v_cache, slots, q_norm=norms[0], k_norm=norms[1],
                     k_scale=scales[0], v_scale=scales[1])

    args = (qkv, cosine, cosine, cache_shape, cache_shape, slots, (scale, scale), (weight, weight))
    program = compile_kernel(run, *args, target_name=target_name, donate_argnums=(3, 4))
    assert [kernel.name for kernel in program.kernels] == ["rope_kv_write"]
    assert program.memory.alias_bytes >= 2 * cache_shape.size * cache_shape.dtype.itemsize
    assert_no_spills(program, record)


@pytest.mark.parametrize("case", covering(AXES), ids=name)
def test_covering_set(case, record_property):
    check(record_property, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(AXES, ["target_name", "width", "group", "block_size"]), ids=name)
def test_whole_grid(case, record_property):
    check(record_property, **case)
