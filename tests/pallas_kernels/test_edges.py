"""What every operation makes of nothing at all, of numpy's arrays, and of dtypes that it does not know."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import int4_matmul, kv_write, paged_attention_decode, paged_attention_ragged, rope_kv_write
from pallas_kernels.int4_matmul import Int4Weight
from tests.pallas_kernels.attention_steps import SCALE, Step, compiled

BACKENDS = ["reference", "triton_interpret"]
decode, ragged = (partial(attend, scale=SCALE) for attend in (paged_attention_decode, paged_attention_ragged))


def decode_arrays(seqs: int = 2, columns: int = 3, blocks: int = 4) -> dict[str, Any]:
    """Of sequences that see nothing: their contexts are 0."""
    cache = np.full((blocks, 16, 1, 16), 7, np.float32)
    return dict(q=np.ones((seqs, 1, 2, 16), np.float32), k_cache=cache, v_cache=cache,
                block_tables=np.zeros((seqs, columns), np.int32), context_lens=np.zeros(seqs, np.int32))


def ragged_arrays(rows: int = 5, tiles: int = 2, **sizes: int) -> dict[str, Any]:
    arrays = decode_arrays(**sizes)
    lens, tile, zero = arrays["context_lens"], np.zeros(tiles, np.int32), np.int32(0)
    return arrays | dict(q=np.ones((rows, 1, 2, 16), np.float32), query_starts=lens, query_lens=lens, num_decodes=zero,
                         tile_seq=tile, tile_row=tile, num_tiles=zero)


def write_arrays(tokens: int = 3, heads: int = 1, blocks: int = 4) -> dict[str, Any]:
    rows, cache = np.ones((tokens, heads, 16), np.float32), np.full((blocks, 16, heads, 16), 7, np.float32)
    return dict(k=rows, v=rows, k_cache=cache, v_cache=cache, slot_mapping=np.arange(16, 16 + tokens, dtype=np.int32))


def rope_arrays(tokens: int = 3, heads: int = 1, blocks: int = 4) -> dict[str, Any]:
    arrays = write_arrays(tokens, heads, blocks)
    del arrays["k"], arrays["v"]
    angles = np.ones((tokens, 8), np.float32)
    return dict(qkv=np.ones((tokens, heads, 4, 16), np.float32), cos=angles, sin=angles) | arrays


def matmul_arrays(tokens: int = 3, features: int = 256, outputs: int = 40, bias: Any = None) -> dict[str, Any]:
    packed: Any = np.ones((features // 128, outputs, 16), np.int32)
    scales: Any = np.ones((features // 128, outputs), np.float32)
    return dict(x=np.ones((tokens, features), np.float32), weight=Int4Weight(packed, scales), bias=bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [dict(seqs=0), dict(columns=0), dict(seqs=0, columns=0), dict(blocks=0)], ids=str)
def test_attention_to_nothing(sizes, backend):
    arrays = decode_arrays(**sizes)
    out = decode(**arrays, backend=backend)
    assert isinstance(out, jax.Array) and out.shape == arrays["q"].shape and not np.asarray(out).any()
    for size in ({}, dict(rows=0), dict(tiles=0), dict(rows=0, tiles=0)):
        arrays = ragged_arrays(**sizes, **size)
        out = ragged(**arrays, backend=backend)
        assert out.shape == arrays["q"].shape and not np.asarray(out).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_decodes_without_room_for_a_tile(backend):
    step = Step([33, 1], [], seqs=3, rows=4)
    *rest, tile_seq, tile_row, num_tiles = step.ragged_arrays()
    run = compiled(partial(ragged, backend=backend))
    step.check(np.asarray(run(*rest, tile_seq[:0], tile_row[:0], num_tiles)), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("write", "arrays"), [(kv_write, write_arrays), (rope_kv_write, rope_arrays)],
                         ids=["kv_write", "rope_kv_write"])
@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(heads=0), dict(tokens=0, blocks=0)], ids=str)
def test_writing_nothing_leaves_the_caches(write, arrays, sizes, backend):
    given = arrays(**sizes)
    *q, k_cache, v_cache = write(**given, backend=backend)
    for new in (k_cache, v_cache):
        assert isinstance(new, jax.Array)
        np.testing.assert_array_equal(new, given["k_cache"])
    assert all(rows.shape == (len(given["qkv"]), sizes.get("heads", 1), 2, 16) for rows in q)


@pytest.mark.parametrize(("write", "arrays"), [(kv_write, write_arrays), (rope_kv_write, rope_arrays)],
                         ids=["kv_write", "rope_kv_write"])
def test_tokens_need_slots(write, arrays):
    with pytest.raises(ValueError, match=r"k_cache \(0, 16, 1, 16\).* 3 tokens"):
        write(**arrays(blocks=0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [dict(tokens=0), dict(outputs=0), dict(features=0)], ids=str)
def test_products_of_nothing(sizes, backend):
    tokens, outputs = sizes.get("tokens", 3), sizes.get("outputs", 40)
    for bias in (None, np.arange(outputs, dtype=np.float32)):
        out = int4_matmul(**matmul_arrays(**sizes, bias=bias), backend=backend)
        np.testing.assert_array_equal(out, np.broadcast_to(0 if bias is None else bias, (tokens, outputs)))


def test_an_unknown_backend_is_an_error_all_the_same():
    for call in (partial(decode, **decode_arrays(seqs=0)), partial(kv_write, **write_arrays(tokens=0))):
        with pytest.raises(ValueError, match="fast"):
            call(backend="fast")


OPERATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "decode": (decode, decode_arrays()),
    "ragged": (ragged, ragged_arrays()),
    "kv_write": (kv_write, write_arrays()),
    "rope_kv_write": (rope_kv_write, rope_arrays() | dict.fromkeys(("q_norm", "k_norm"), np.ones(16, np.float32))),
    "int4_matmul": (int4_matmul, matmul_arrays(bias=np.ones(40, np.float32))),
}
FLOATS = ("q", "k", "v", "qkv", "q_norm", "k_norm", "x", "bias")
BAD_DTYPES = [
    *((operation, name, dtype) for operation, (_, arrays) in OPERATIONS.items() for name in arrays
      for dtype in ("int32", "float64", "float8_e5m2") if name in FLOATS),
    *((operation, "k_cache", dtype) for operation in ("decode", "ragged", "kv_write", "rope_kv_write")
      for dtype in ("float8_e5m2", "float64", "int16", "uint8")),
    *((operation, name, "int64") for operation, (_, arrays) in OPERATIONS.items() for name, array in arrays.items()
      if not isinstance(array, tuple) and array.dtype == np.int32),
]


@pytest.mark.parametrize(("operation", "name", "dtype"), BAD_DTYPES)
def test_dtypes_that_are_refused(operation, name, dtype):
    """numpy's: JAX itself would turn those of 64 bits into others without a word."""
    run, arrays = OPERATIONS[operation]
    changed = {name: arrays[name].astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))}
    if name == "k_cache":
        changed["v_cache"] = changed["k_cache"]
    allowed = "int32" if dtype == "int64" else "float32, bfloat16"
    with pytest.raises(ValueError, match=rf"{name}\b.* {dtype}: must be .*{allowed}"):
        run(**arrays | changed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_numpy_arrays_serve_as_those_of_jax(backend):
    """Those that a traced function finds around it: as arguments, jit would make them JAX's."""
    step = Step([33, 1], [(5, 20)], seqs=4, rows=9, cache=jnp.int8, scales="block")
    scales = dict(k_scale=step.k_scale, v_scale=step.v_scale)
    step.check(np.asarray(compiled(partial(ragged, *step.ragged_arrays(), **scales, backend=backend))()), 1e-5)
    step = Step([33, 1], [], seqs=3, rows=3, dtype=jnp.bfloat16)
    arrays = step.q, step.k_cache, step.v_cache, step.block_tables, step.context_lens
    step.check(np.asarray(compiled(partial(decode, *arrays, backend=backend))(), np.float32), 1e-2)
    for name in ("kv_write", "rope_kv_write", "int4_matmul"):
        run, given = OPERATIONS[name]
        on_jax = run(**jax.tree.map(jnp.asarray, given), backend="reference")
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), run(**given, backend=backend), on_jax)
