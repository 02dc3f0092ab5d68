"""The Triton kernels compiled for every generation of cards: launched as meant, and without spills."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import get_target
from pallas_kernels import QUERY_TILE, paged_attention_decode, paged_attention_ragged
from tests.pallas_kernels.compiling import ARCHITECTURES, assert_no_spills, compile_kernel
from tests.pallas_kernels.covering import covering, grid

NUM_SEQS, NUM_KV_HEADS, NUM_COLUMNS, NUM_ROWS = 4, 2, 512, 100
SMALL_CACHE, LARGE_CACHE = 2**24, 2**32 + 2**28
"""Elements. Offsets into the large one have 64 bits."""

AXES: dict[str, Any] = {
    "arch": list(ARCHITECTURES),
    "width": [64, 80, 96, 128, 256],
    "group": [1, 4, 6, 7, 8, 16],
    "cache": ["bfloat16", "float16", "int8", "float8_e4m3fn"],
    "block_size": [16, 32],
    "scales": ["head", "block"],
    "options": [{}, {"window": 4096}, {"soft_cap": 30.0}, {"window": 4096, "soft_cap": 30.0}],
    "elements": [SMALL_CACHE, LARGE_CACHE],
}


def check(record: Any, *, arch: str, width: int, group: int, cache: str, block_size: int, scales: str, options: Any,
          elements: int, decode: bool = False) -> None:
    """Compiles a mixed step, or a decode step."""
    target_name = ARCHITECTURES[arch]
    num_blocks = elements // (block_size * NUM_KV_HEADS * width)
    dtype = jnp.dtype(cache)
    quantised = dtype.itemsize == 1
    scale_shape = (num_blocks, NUM_KV_HEADS) if scales == "block" else (NUM_KV_HEADS,)
    scale = jax.ShapeDtypeStruct(scale_shape, jnp.float32) if quantised else None
    caches = [jax.ShapeDtypeStruct((num_blocks, block_size, NUM_KV_HEADS, width), dtype)] * 2
    device = get_target(target_name).mesh().devices.flat[0]
    kernel = functools.partial(paged_attention_decode if decode else paged_attention_ragged,
                               scale=width**-0.5, backend="triton", device=device, **options)

    def step(k_scale: Any, v_scale: Any, *arrays: Any) -> jax.Array:
        return kernel(*arrays, k_scale=k_scale, v_scale=v_scale)

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    query_dtype = jnp.bfloat16 if quantised else dtype
    q = jax.ShapeDtypeStruct((NUM_SEQS if decode else NUM_ROWS, NUM_KV_HEADS, group, width), query_dtype)
    arrays = [q, *caches, int32(NUM_SEQS, NUM_COLUMNS), int32(NUM_SEQS)]
    if not decode:
        num_tiles = NUM_ROWS // QUERY_TILE + NUM_SEQS
        arrays += [int32(NUM_SEQS), int32(NUM_SEQS), int32(), int32(num_tiles), int32(num_tiles), int32()]
    program = compile_kernel(step, scale, scale, *arrays, target_name=target_name)
    names = ["paged_attention_decode", "paged_attention_combine", *([] if decode else ["paged_attention_ragged"])]
    assert [kernel.name for kernel in program.pallas_kernels] == names
    assert not program.copies
    assert_no_spills(program, record)


@pytest.mark.parametrize("case", covering(AXES), ids=str)
def test_covering_set(case, record_property):
    check(record_property, **case)


def test_decode_step(record_property):
    """Two launches and nothing else; the kernels themselves are in the mixed step too."""
    case = {name: values[-1] for name, values in AXES.items()}
    check(record_property, **case, decode=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(AXES, ["arch", "width", "group", "cache", "block_size"]), ids=str)
def test_whole_grid(case, record_property):
    check(record_property, **case)
