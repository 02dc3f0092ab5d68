"""Paged attention against dense attention in numpy, with poison in every slot that nothing may read.

The kernels run here in Pallas' interpreter, which leaves NaN where a kernel writes nothing.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QUERY_TILE, paged_attention_decode
from tests.pallas_kernels.attention_steps import Step

BACKENDS = ["reference", "triton_interpret"]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 19},
    {"soft_cap": 2.0},
    {"window": 150, "soft_cap": 5.0},
]

QUANTISED: dict[str, dict[str, Any]] = {
    "int8 by head": dict(cache=jnp.int8, scales="head"),
    "int8 by block": dict(cache=jnp.int8, scales="block"),
    "float8": dict(cache=jnp.float8_e4m3fn),
    "float8 by head": dict(cache=jnp.float8_e4m3fn, scales="head"),
    "float8 by block": dict(cache=jnp.float8_e4m3fn, scales="block"),
}


@pytest.mark.parametrize(
    ("backend", "options"),
    [*(("reference", options) for options in OPTIONS), ("triton_interpret", {"window": 150, "soft_cap": 5.0})],
    ids=str,
)
def test_decode_matches_dense(options, backend):
    step = Step([137, 1, 16, 17, 300], [])  # row 5 is padding
    step.check(step.decode(backend=backend, **options), 1e-5, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_matches_dense(options, backend):
    step = Step([33, 1, 200], [(1, 1), (QUERY_TILE + 7, QUERY_TILE + 7), (37, 291)])
    step.check(step.ragged(backend=backend, **options), 1e-5, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(4, 1, 64), (1, 4, 80), (1, 6, 96), (2, 7, 128), (1, 8, 256), (1, 16, 16)], ids=str)
def test_head_counts_and_widths(heads, backend):
    step = Step([130, 7], [(20, 20), (5, 70)], heads=heads, rows=32)  # decodes go through the same code as decode()
    step.check(step.ragged(backend=backend), 1e-5)


@pytest.mark.parametrize(
    ("backend", "block_size", "columns"),
    [("reference", 1, 70), ("reference", 32, 3), ("reference", 256, 1), ("triton_interpret", 32, 3)],
)
def test_block_sizes(block_size, columns, backend):
    step = Step([33, 5], [(9, 61)], block_size=block_size, columns=columns)
    step.check(step.ragged(backend=backend), 1e-5)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("reference", jnp.bfloat16), ("triton_interpret", jnp.bfloat16), ("triton_interpret", jnp.float16)],
)
def test_halves_accumulate_in_float32(dtype, backend):
    step = Step([137, 16], [(70, 90)], dtype=dtype)
    step.check(step.ragged(backend=backend), 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cache", QUANTISED)
def test_quantised_caches(cache, backend):
    step = Step([137, 16], [(70, 90)], heads=(3, 2, 80), **QUANTISED[cache])
    step.check(step.ragged(backend=backend), 1e-5)


@pytest.mark.parametrize("cache", ["int8 by block", "float8 by head"])
def test_quantised_caches_in_bfloat16(cache):
    step = Step([137, 16], [(70, 90)], dtype=jnp.bfloat16, **QUANTISED[cache])
    step.check(step.ragged(backend="triton_interpret"), 1e-2)


@pytest.mark.parametrize(
    ("backend", "decodes"),
    [("reference", [64]), ("reference", [1]), ("reference", [300]), ("triton_interpret", [1])],
)
def test_single_sequence(decodes, backend):
    step = Step(decodes, [], seqs=1)
    step.check(step.decode(backend=backend), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_rows_than_sequences_and_full_buffer(backend):
    step = Step([9], [(3, 3), (12, 40)], rows=16, seqs=32, columns=3)
    step.check(step.ragged(backend=backend), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_padding_is_zero(backend):
    step = Step([], [])
    assert not step.decode(backend=backend).any()
    assert not step.ragged(backend=backend).any()


def test_order_of_sequences_does_not_change_a_row():
    step = Step([137, 1, 16, 17, 300, 60], [])
    together = step.decode()
    step.context_lens[[0, 2, 3, 4, 5]] = 0
    np.testing.assert_allclose(step.decode()[1], together[1], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (6, 3, 64)}, "q "),
        ({"q": (6, 2, 4, 64)}, "k_cache"),
        ({"v_cache": (5, 16, 3, 64)}, "v_cache"),
        ({"block_tables": (5, 4)}, "block_tables"),
        ({"context_lens": (5,)}, "context_lens"),
        ({"k_scale": (3,)}, "k_scale"),
        ({"window": 0}, "window"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"backend": "fast"}, "backend"),
    ],
)
def test_bad_input_is_named(change, message):
    shapes = {"q": (6, 3, 3, 64), "k_cache": (9, 16, 3, 64), "v_cache": (9, 16, 3, 64)}
    tables = {"block_tables": (6, 4), "context_lens": (6,)}
    arrays: dict[str, Any] = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
    arrays |= {name: jnp.zeros(change.get(name, shape), jnp.int32) for name, shape in tables.items()}
    if "k_scale" in change:
        arrays["k_scale"] = jnp.ones(change["k_scale"])
    options = {name: value for name, value in change.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        paged_attention_decode(**arrays, scale=1.0, **options)


def test_indices_must_be_int32():
    cache = jnp.zeros((9, 16, 3, 64))
    lens = jnp.zeros(6, jnp.int32)
    with pytest.raises(ValueError, match=r"block_tables.*int32"):
        paged_attention_decode(jnp.zeros((6, 3, 3, 64)), cache, cache, jnp.zeros((6, 4)), lens, scale=1.0)
