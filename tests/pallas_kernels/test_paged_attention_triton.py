"""What only the Triton kernels have: splits, tiles, refusals. And that the tests of the kernels see what is broken."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention_decode
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention import triton, triton_ragged, triton_tiles
from pallas_kernels.paged_attention.quantization import e4m3_to_float32
from pallas_kernels.paged_attention.triton_tiles import Cache, KeyTiles
from tests.pallas_kernels.attention_steps import FLOAT8, SCALE, Step, compiled
from tests.pallas_kernels.covering import covering

DECODE_TILES = triton.DecodeTiles(16, num_warps=4, num_stages=2, programs_per_core=8, split_keys=16, most_split_keys=64)
RAGGED_TILES = triton_ragged.RaggedTiles(rows=32, keys=16, num_warps=4, num_stages=2)
A100 = Target("gpu", (8, 0), 108)


def run_decode(step, num_splits=1, *, window=None, soft_cap=None, target=A100):
    options: dict[str, Any] = dict(scale=SCALE, window=window, soft_cap=soft_cap, target=target, interpret=True)
    run = compiled(functools.partial(triton.decode, tiles=DECODE_TILES, num_splits=num_splits, **options))
    cache = Cache(step.k_cache, step.v_cache, step.k_scale, step.v_scale)
    return np.asarray(run(step.q[: len(step.context_lens)], cache, step.block_tables, step.context_lens), np.float32)


def run_ragged(step, *, window=None, soft_cap=None, tiles=RAGGED_TILES):
    options: dict[str, Any] = dict(scale=SCALE, window=window, soft_cap=soft_cap, target=A100, interpret=True)
    run = compiled(functools.partial(triton_ragged.ragged, tiles=tiles, decode_tiles=DECODE_TILES, **options))
    q, k_cache, v_cache, *rest = step.ragged_arrays()
    return np.asarray(run(q, Cache(k_cache, v_cache, step.k_scale, step.v_scale), *rest), np.float32)


@pytest.mark.parametrize(("num_splits", "options"), [(8, {}), (2, {"window": 100, "soft_cap": 2.0})], ids=str)
def test_splits_add_up(num_splits, options):
    step = Step([137, 1, 16, 17, 300], [])  # with 8 splits, some have nothing to do
    step.check(run_decode(step, num_splits, **options), 1e-5, **options)


def test_long_context():
    step = Step([5000], [], heads=(1, 1, 16), seqs=1, columns=320)
    step.check(step.decode(backend="triton_interpret"), 1e-5)


def test_scales_of_float8_on_cards_without_its_conversion():
    step = Step([137, 16, 40], [], cache=FLOAT8, scales="block")
    step.check(run_decode(step), 1e-5)


def test_every_float8_by_integer_arithmetic():
    codes = np.arange(256, dtype=np.uint8).view(FLOAT8)
    np.testing.assert_array_equal(jax.jit(e4m3_to_float32)(codes), codes.astype(np.float32))


@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 40}], ids=str)
def test_pieces_of_tiles(options):
    """Tiles of 64 rows in pieces of 8, programs with several pieces, ends that fall into the middle of a piece."""
    step = Step([20], [(3, 3), (64, 130), (9, 9), (70, 75), (1, 33)], seqs=7, heads=(1, 3, 32))
    step.check(run_ragged(step, **options), 1e-5, **options)


def test_many_short_chunks_share_programs():
    step = Step([], [(1, length) for length in range(1, 33)], seqs=32, rows=32, heads=(2, 4, 16), columns=4)
    step.check(run_ragged(step), 1e-5)


CASES: dict[str, Any] = {
    "width": [64, 80, 96, 128, 256],
    "group": [1, 4, 6, 7, 8, 16],
    "block_size": [16, 32],
    "cache": [(jnp.float32, None), (jnp.int8, "head"), (jnp.float8_e4m3fn, "block")],
    "options": [{}, {"window": 33}, {"soft_cap": 3.0}],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", covering(CASES), ids=str)
def test_covering_set(case):
    cache, scales = case["cache"]
    heads = (2, case["group"], case["width"])
    shape: dict[str, Any] = dict(heads=heads, block_size=case["block_size"], cache=cache, scales=scales, columns=10)
    step = Step([150, 3], [(70, 71), (20, 100)], **shape)
    step.check(run_ragged(step, **case["options"]), 1e-5, **case["options"])


def test_number_of_splits():
    tiles = replace(DECODE_TILES, programs_per_core=4, split_keys=256, most_split_keys=16384)
    choose = functools.partial(triton.choose_num_splits, num_cores=132, tiles=tiles)
    for num_programs in (1, 8, 24, 100, 256, 2048):
        for most_keys in (16, 2048, 131072):
            splits = choose(num_programs, most_keys)
            assert splits & (splits - 1) == 0 and (splits == 1 or most_keys // splits >= 256)
    assert choose(8, 131072) * 8 >= 132  # one long sequence with 8 KV heads: every core has work
    assert choose(2048, 8192) == 1  # enough work without a combine kernel
    assert choose(2048, 131072) >= 8  # one long sequence among many


# Each of these breaks a kernel in one small place; the comparison that passes without it must then fail.


def pages_of_the_first_sequence(self, index):
    return ORIGINAL_PAGES(replace(self, seq=self.seq * 0), index)


def without_the_last_tile(*args):
    begin, end, num_tiles = ORIGINAL_TILE_RANGE(*args)
    return begin, end, num_tiles - 1


ORIGINAL_PAGES, ORIGINAL_TILE_RANGE = KeyTiles.pages, triton_ragged._tile_range
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "wrong block table": (KeyTiles, "pages", pages_of_the_first_sequence),
    "missing rescale": (triton_tiles, "_rescale", lambda old, new: jnp.ones_like(old)),
    "forgotten scale": (triton_tiles, "_LOG2_E", 1.0),
}
DECODE_MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    **MUTATIONS,
    "dropped tail tile": (triton, "cdiv", lambda count, size: count // size),
    "splits that weigh the same": (triton_tiles.Softmax, "log2_total", lambda self: jnp.zeros_like(self.high)),
}
RAGGED_MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    **MUTATIONS,
    "dropped tail tile": (triton_ragged, "_tile_range", without_the_last_tile),
    "unmasked tiles that not all see": (
        triton_ragged, "_tile_range", lambda start, first, last, keys, window: (0, (last + 1) // keys, last // keys + 1)
    ),
}


def decode_error() -> float:
    step = Step([37, 50, 79], [], seqs=3, heads=(1, 2, 32), rising=0.3)
    return step.error(run_decode(step, 2))


def ragged_error() -> float:
    step = Step([], [(5, 37), (30, 70)], seqs=2, heads=(1, 2, 32), rows=40, rising=0.3)
    return step.error(run_ragged(step))


def test_unbroken():
    assert decode_error() < 1e-5
    assert ragged_error() < 1e-5


@pytest.mark.parametrize("mutation", DECODE_MUTATIONS)
def test_broken_decode_is_seen(monkeypatch, mutation):
    monkeypatch.setattr(*DECODE_MUTATIONS[mutation])
    assert decode_error() > 1e-3


@pytest.mark.parametrize("mutation", RAGGED_MUTATIONS)
def test_broken_ragged_is_seen(monkeypatch, mutation):
    monkeypatch.setattr(*RAGGED_MUTATIONS[mutation])
    assert ragged_error() > 1e-3


def test_rows_that_are_not_cleared_are_seen(monkeypatch):
    monkeypatch.setattr(triton_ragged, "_clear_unused_rows", lambda *args: None)
    step = Step([], [(5, 37)], seqs=2, heads=(1, 2, 32), rows=40)
    with pytest.raises(AssertionError):
        step.check(run_ragged(step), 1e-5)


def test_refusals():
    """A named backend is never replaced; an unnamed one gives way to the reference."""
    h200: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    step = Step([37, 50], [], seqs=2)
    with pytest.raises(NotImplementedError, match="float32"):
        step.decode(backend="triton", device=h200)
    step.check(step.decode(device=h200), 1e-5)
    with pytest.raises(NotImplementedError, match=r"8\.0"):
        step.decode(backend="triton", device=jax.devices("cpu")[0])


def test_offsets_that_wrap_are_refused():
    h200: Any = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    cache = jax.ShapeDtypeStruct((2**17 + 1, 16, 8, 128), jnp.float8_e4m3fn)
    q = jax.ShapeDtypeStruct((4, 8, 4, 128), jnp.bfloat16)
    tables, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 8), (4,)))
    run = functools.partial(paged_attention_decode, scale=SCALE, backend="triton", device=h200)
    with pytest.raises(NotImplementedError, match="wrap"):
        jax.eval_shape(run, q, cache, cache, tables, lens)
