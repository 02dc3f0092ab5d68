"""Paged attention against dense attention in numpy, with NaN in every slot that nothing may read."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import QUERY_TILE, paged_attention_decode, paged_attention_ragged

SCALE = 0.11


def dense(q, k, v, positions, window, soft_cap):
    """q [R, K, G, H] at `positions`, k and v [C, K, H] -> [R, K, G, H], float64."""
    scores = np.einsum("rkgh,ckh->rkgc", q.astype(np.float64), k.astype(np.float64)) * SCALE
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    key = np.arange(len(k))
    visible = key <= positions[:, None]
    if window is not None:
        visible &= key > positions[:, None] - window
    scores = np.where(visible[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("rkgc,ckh->rkgh", weights / weights.sum(-1, keepdims=True), v.astype(np.float64))


class Step:
    """A mixed step with random data: decodes (context lengths) first, then chunks (rows, context length)."""

    def __init__(self, decodes, chunks, *, heads=(3, 3, 64), block_size=16, rows=160, seqs=6, columns=20, dtype="f4"):
        rng = np.random.default_rng(7)
        num_kv_heads, group, width = heads
        self.sequences = [(1, context) for context in decodes] + list(chunks)
        self.num_decodes = len(decodes)
        num_blocks = seqs * columns + 1
        free = iter(rng.permutation(np.arange(1, num_blocks)))
        self.k_cache, self.v_cache = np.full((2, num_blocks, block_size, num_kv_heads, width), np.nan, np.float32)
        self.q = rng.normal(size=(rows, num_kv_heads, group, width)).astype(dtype)
        self.block_tables = np.zeros((seqs, columns), np.int32)
        self.context_lens, self.query_starts, self.query_lens = np.zeros((3, seqs), np.int32)
        self.keys, self.tiles, row = [], [], 0
        for seq, (num_rows, context) in enumerate(self.sequences):
            self.context_lens[seq], self.query_starts[seq], self.query_lens[seq] = context, row, num_rows
            k, v = rng.normal(size=(2, context, num_kv_heads, width)).astype(dtype)
            self.keys.append((k, v))
            for column in range(-(-context // block_size)):
                block = self.block_tables[seq, column] = next(free)
                part = slice(column * block_size, min((column + 1) * block_size, context))
                self.k_cache[block, : part.stop - part.start] = k[part]
                self.v_cache[block, : part.stop - part.start] = v[part]
            if seq >= self.num_decodes:
                self.tiles += [(seq, start) for start in range(row, row + num_rows, QUERY_TILE)]
            row += num_rows
        self.num_rows = row
        self.k_cache, self.v_cache = self.k_cache.astype(dtype), self.v_cache.astype(dtype)

    def want(self, window=None, soft_cap=None):
        out = []
        for (num_rows, context), start, (k, v) in zip(self.sequences, self.query_starts, self.keys, strict=False):
            q = self.q[start : start + num_rows]
            out.append(dense(q, k, v, np.arange(context - num_rows, context), window, soft_cap))
        return np.concatenate(out)

    def ragged(self, **options):
        tile_seq, tile_row = np.zeros((2, len(self.tiles) + 3), np.int32)
        for index, (seq, row) in enumerate(self.tiles):
            tile_seq[index], tile_row[index] = seq, row
        counts = [np.int32(self.num_decodes), tile_seq, tile_row, np.int32(len(self.tiles))]
        per_seq = [self.block_tables, self.context_lens, self.query_starts, self.query_lens]
        run = jax.jit(functools.partial(paged_attention_ragged, scale=SCALE, **options))
        return np.asarray(run(self.q, self.k_cache, self.v_cache, *per_seq, *counts).astype(jnp.float32))

    def decode(self, **options):
        run = jax.jit(functools.partial(paged_attention_decode, scale=SCALE, **options))
        q = self.q[: len(self.context_lens)]
        return np.asarray(run(q, self.k_cache, self.v_cache, self.block_tables, self.context_lens).astype(jnp.float32))


OPTIONS = [
    {},
    {"window": 1},
    {"window": 19},
    {"soft_cap": 2.0},
    {"window": 150, "soft_cap": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_matches_dense(options):
    step = Step([137, 1, 16, 17, 300], [])  # row 5 is padding
    got = step.decode(**options)
    np.testing.assert_allclose(got[:5], step.want(**options), atol=1e-5)
    assert not got[5].any()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ragged_matches_dense(options):
    step = Step([33, 1, 200], [(1, 1), (QUERY_TILE + 7, QUERY_TILE + 7), (37, 291)])
    got = step.ragged(**options)
    np.testing.assert_allclose(got[: step.num_rows], step.want(**options), atol=1e-5)
    assert not got[step.num_rows :].any()


@pytest.mark.parametrize("heads", [(4, 1, 64), (1, 3, 80), (2, 4, 128), (1, 8, 64)], ids=str)
def test_head_counts_and_widths(heads):
    step = Step([130, 7], [(20, 20), (5, 70)], heads=heads, rows=32)  # decodes go through the same code as decode()
    np.testing.assert_allclose(step.ragged()[: step.num_rows], step.want(), atol=1e-5)


@pytest.mark.parametrize(("block_size", "columns"), [(1, 70), (32, 3), (256, 1)])
def test_block_sizes(block_size, columns):
    step = Step([33, 5], [(9, 61)], block_size=block_size, columns=columns)
    np.testing.assert_allclose(step.ragged()[: step.num_rows], step.want(), atol=1e-5)


def test_bfloat16_accumulates_in_float32():
    step = Step([137, 16], [(70, 90)], dtype=jnp.bfloat16)
    got = step.ragged()[: step.num_rows]
    np.testing.assert_allclose(got, step.want(), atol=1e-2)


@pytest.mark.parametrize("decodes", [[64], [1], [300]])
def test_single_sequence(decodes):
    step = Step(decodes, [], seqs=1)
    np.testing.assert_allclose(step.decode(), step.want(), atol=1e-5)


def test_fewer_rows_than_sequences_and_full_buffer():
    step = Step([9], [(3, 3), (12, 40)], rows=16, seqs=32, columns=3)
    np.testing.assert_allclose(step.ragged()[:16], step.want(), atol=1e-5)


def test_only_padding_is_zero():
    step = Step([], [])
    assert not step.decode().any()
    assert not step.ragged().any()


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
    options = {name: value for name, value in change.items() if name not in arrays}
    with pytest.raises(ValueError, match=message):
        paged_attention_decode(**arrays, scale=1.0, **options)


def test_indices_must_be_int32():
    cache = jnp.zeros((9, 16, 3, 64))
    lens = jnp.zeros(6, jnp.int32)
    with pytest.raises(ValueError, match=r"block_tables.*int32"):
        paged_attention_decode(jnp.zeros((6, 3, 3, 64)), cache, cache, jnp.zeros((6, 4)), lens, scale=1.0)
