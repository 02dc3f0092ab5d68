"""Mixed steps of random data over a poisoned cache, and what attention makes of them, in numpy and float64."""

import functools
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import QUERY_TILE, paged_attention_decode, paged_attention_ragged

SCALE = 0.11
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Small programs that run once: most of their time is the compiler's."""


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
    """A mixed step with random data: decodes (context lengths) first, then chunks (rows, context length).

    What no kernel may read is poison: slots past a context, blocks of no sequence and their scales are NaN (the largest
    number where the cache is int8), table entries past a context name any block, tiles past the last one lead astray.

    Args:
        heads: (K, G, H).
        rows: T, seqs: S, columns: M.
        dtype: of q; of the cache too unless `cache` is given.
        cache: dtype of the cache; int8 and float8_e4m3fn need `scales`, "head" or "block".
        rising: by how much scores grow from token to token, up to those of a context's last one. Far from 0, every tile
            of keys outweighs those before it, whatever the rest of the data: what is broken on purpose must show.
    """

    def __init__(
        self,
        decodes: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int, int] = (3, 3, 64),
        block_size: int = 16,
        rows: int = 160,
        seqs: int = 6,
        columns: int = 20,
        dtype: Any = np.float32,
        cache: Any = None,
        scales: str | None = None,
        rising: float = 0.0,
    ):
        self.seed = secrets.randbits(32)
        rng = np.random.default_rng(self.seed)
        num_kv_heads, group, width = heads
        cache = np.dtype(dtype if cache is None else cache)
        self.sequences = [(1, context) for context in decodes] + list(chunks)
        self.num_decodes = len(decodes)
        num_blocks = seqs * columns + 3
        free = iter(rng.permutation(np.arange(1, num_blocks)))
        poison = 127 if cache == np.int8 else np.nan
        self.k_cache, self.v_cache = np.full((2, num_blocks, block_size, num_kv_heads, width), poison).astype(cache)
        self.k_scale, self.v_scale = self._scales(rng, scales, num_blocks, num_kv_heads)
        self.q = rng.normal(size=(rows, num_kv_heads, group, width)).astype(dtype)
        if rising:  # one lane of products is the part of the scores that grows
            self.q[..., 0] = 1
        self.block_tables = rng.integers(0, num_blocks, (seqs, columns), dtype=np.int32)
        self.context_lens, self.query_starts, self.query_lens = np.zeros((3, seqs), np.int32)
        self.keys: list[tuple[np.ndarray, np.ndarray]] = []
        self.tiles, row = [], 0
        used = np.zeros(num_blocks, bool)
        for seq, (num_rows, context) in enumerate(self.sequences):
            self.context_lens[seq], self.query_starts[seq], self.query_lens[seq] = context, row, num_rows
            position = np.arange(context)
            blocks = np.array([next(free) for _ in range(-(-context // block_size))], np.int32)
            self.block_tables[seq, : len(blocks)] = blocks
            used[blocks] = True
            block, slot = blocks[position // block_size], position % block_size
            for values in (self.k_cache, self.v_cache):
                values[block, slot] = self._stored(rng, (context, num_kv_heads, width), cache, scales)
            if rising:
                self.k_cache[block, slot, :, 0] = (rising / SCALE * (position + 1 - context))[:, None]
            self.keys.append((self._read(self.k_cache, self.k_scale, block, slot),
                              self._read(self.v_cache, self.v_scale, block, slot)))
            if seq >= self.num_decodes:
                self.tiles += [(seq, start) for start in range(row, row + num_rows, QUERY_TILE)]
            row += num_rows
        self.num_rows = row
        if scales == "block":
            self.k_scale[~used], self.v_scale[~used] = np.nan, np.nan

    @staticmethod
    def _scales(rng, kind, num_blocks, num_kv_heads):
        if kind is None:
            return None, None
        shape = (num_blocks, num_kv_heads) if kind == "block" else (num_kv_heads,)
        return rng.uniform(0.005, 0.02, (2, *shape)).astype(np.float32)

    @staticmethod
    def _stored(rng, shape, cache, scales):
        if cache == np.int8:
            return rng.integers(-128, 128, shape, dtype=np.int8)
        if cache == FLOAT8:  # subnormal numbers too: below 2 ** -6; unscaled no scores in the hundreds, ill-conditioned
            most = 7 if scales else 1
            return (rng.normal(size=shape) * 2.0 ** rng.integers(-9, most, shape)).astype(cache)
        return rng.normal(size=shape).astype(cache)

    @staticmethod
    def _read(cache, scale, block, slot):
        values = cache[block, slot].astype(np.float64)
        if scale is None:
            return values
        return values * (scale[block][:, :, None] if scale.ndim == 2 else scale[:, None])

    def want(self, window=None, soft_cap=None):
        """[num_rows, K, G, H] float64."""
        out = []
        for (num_rows, context), start, (k, v) in zip(self.sequences, self.query_starts, self.keys, strict=False):
            q = self.q[start : start + num_rows]
            out.append(dense(q, k, v, np.arange(context - num_rows, context), window, soft_cap))
        return np.concatenate(out)

    def ragged_arrays(self):
        """The arguments of paged_attention_ragged."""
        tile_seq, tile_row = np.full((2, len(self.tiles) + 3), 10**6, np.int32)
        for index, (seq, row) in enumerate(self.tiles):
            tile_seq[index], tile_row[index] = seq, row
        counts = [np.int32(self.num_decodes), tile_seq, tile_row, np.int32(len(self.tiles))]
        per_seq = [self.block_tables, self.context_lens, self.query_starts, self.query_lens]
        return self.q, self.k_cache, self.v_cache, *per_seq, *counts

    def ragged(self, **options):
        """[T, K, G, H] float32."""
        run = compiled(functools.partial(paged_attention_ragged, scale=SCALE, **options))
        return np.asarray(run(*self.ragged_arrays(), k_scale=self.k_scale, v_scale=self.v_scale).astype(jnp.float32))

    def decode(self, **options):
        """[S, K, G, H] float32; rows are the sequences'."""
        run = compiled(functools.partial(paged_attention_decode, scale=SCALE, **options))
        q = self.q[: len(self.context_lens)]
        arrays = (q, self.k_cache, self.v_cache, self.block_tables, self.context_lens)
        return np.asarray(run(*arrays, k_scale=self.k_scale, v_scale=self.v_scale).astype(jnp.float32))

    def error(self, got, **options):
        """Of got [num_rows or more, K, G, H]: the largest distance of a head's output, relative to its length."""
        want = self.want(**options)
        distance = np.linalg.norm(got[: self.num_rows] - want, axis=-1) / np.linalg.norm(want, axis=-1)
        return np.inf if np.isnan(distance).any() else distance.max(initial=0)

    def check(self, got, tolerance, **options):
        """As `error`, and that rows of no sequence are 0."""
        assert self.error(got, **options) < tolerance, f"seed {self.seed}"
        assert not got[self.num_rows :].any()
