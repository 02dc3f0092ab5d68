"""Paged attention in plain jax.numpy: the CPU path, and what the kernels are checked against.

Cost follows the live tokens, never the width of the block table: loops end where the longest context of their group
ends. What the shapes of these loops owe to XLA:CPU (measured, JAX 0.10):

- Reading the cache is the cost of decode, and it is bound by memory latency. Rows are gathered slot by slot across the
  blocks of a step (slot 0 of every block, slot 1 of every block, ...): several blocks are in flight at once, which is
  about 15 % faster than block after block. Softmax does not mind the order of keys.
- An index in these loops is a handful of instructions in every layer, most of which guard against what cannot be:
  negative indices, those past the end, quotients of negative numbers. They are left out (`_at`, `_slice`).
- A dot per KV head would need keys with the head axis in front, and that transposed gather costs more than the dot. So
  decode multiplies whole [K * H] rows with block-diagonal queries: K times the arithmetic, no transpose.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

QUERY_TILE = 64
_GROUP = 2  # sequences per decode loop
_DECODE_KEYS = 64  # tokens of each sequence per step of that loop
_TILE_KEYS = 64  # tokens per step of a query tile's loop
_MASKED = -1e30  # finite: a step that is masked as a whole must not make NaN; a later real score scales it away


def decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See api.paged_attention_decode. Sequences run in groups of similar length, longest first."""
    num_seqs, num_kv_heads, group_heads, head_dim = q.shape
    group = min(_GROUP, num_seqs)
    num_padding = -num_seqs % group
    order = jnp.argsort(-jnp.pad(context_lens, (0, num_padding)))
    lens = jnp.pad(context_lens, (0, num_padding))[order]
    tables = jnp.pad(block_tables, ((0, num_padding), (0, 0)))[order]
    # [S, K, G, H] -> block-diagonal [S, K * G, K * H]: each query is zero outside its own KV head's columns.
    own_head = jnp.eye(num_kv_heads, dtype=jnp.float32)[:, None, :, None]
    rows = jnp.pad(q, ((0, num_padding), (0, 0), (0, 0), (0, 0)))[order].astype(jnp.float32) * scale
    rows = (rows[:, :, :, None] * own_head).reshape(len(order), num_kv_heads * group_heads, num_kv_heads * head_dim)

    caches = (k_cache, v_cache)

    def attend_group(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * group
        query, table = _slice(rows, start, group), _slice(tables, start, group)
        last = _slice(lens, start, group)[:, None] - 1
        first = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)

        def scores_of(keys: jax.Array) -> jax.Array:
            return jnp.einsum("snd,scd->snc", query, keys)[:, :, None]

        def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
            return jnp.einsum("snc,scd->snd", weights[:, :, 0], values)[:, :, None]

        shape = (group, query.shape[1], 1, query.shape[2])
        mixed = _online_softmax(scores_of, mix, shape, first, last, table, caches, _DECODE_KEYS, soft_cap)
        mixed = mixed.reshape(group, num_kv_heads, group_heads, num_kv_heads, head_dim)
        mixed = jnp.where(last[:, :, None, None] >= 0, (mixed * own_head).sum(3), 0)
        return _update(out, mixed.astype(q.dtype), start)

    num_live_groups = jax.lax.div((context_lens > 0).sum(dtype=jnp.int32) + group - 1, group)
    out = jnp.zeros((len(order), *q.shape[1:]), q.dtype)
    out = jax.lax.fori_loop(0, num_live_groups, attend_group, out)
    return out[jnp.argsort(order)[:num_seqs]]


def ragged(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    num_decodes: jax.Array,
    tile_seq: jax.Array,
    tile_row: jax.Array,
    num_tiles: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> jax.Array:
    """See api.paged_attention_ragged. Decodes go through `decode`: they do not pay for a query tile each."""
    num_rows, num_kv_heads, group_heads, head_dim = q.shape
    most_decodes = min(num_rows, len(block_tables))
    decode_lens = jnp.where(jnp.arange(most_decodes) < num_decodes, context_lens[:most_decodes], 0)
    decode_q, decode_tables = q[:most_decodes], block_tables[:most_decodes]
    decoded = decode(
        decode_q, k_cache, v_cache, decode_tables, decode_lens, scale=scale, window=window, soft_cap=soft_cap
    )
    # One tile more than there are rows, so that no tile's slice is clamped at the end and thereby moved.
    padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros_like(padded).at[:most_decodes].set(decoded)

    def attend_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        seq, start = _at(tile_seq, tile), _at(tile_row, tile)
        first_row, num_live = _at(query_starts, seq), _at(query_lens, seq)
        row = start + jnp.arange(QUERY_TILE)
        live = row < first_row + num_live
        position = _at(context_lens, seq) - num_live + row - first_row
        last = jnp.where(live, position, -1)
        first = jnp.zeros_like(last) if window is None else jnp.maximum(position - window + 1, 0)
        query = _slice(padded, start, QUERY_TILE).astype(jnp.float32) * scale
        query = query.transpose(1, 2, 0, 3).reshape(num_kv_heads, group_heads * QUERY_TILE, head_dim)

        def by_head(rows: jax.Array) -> jax.Array:  # [1, C, K * H] -> [K, C, H]
            return rows.reshape(-1, num_kv_heads, head_dim).transpose(1, 0, 2)

        def scores_of(keys: jax.Array) -> jax.Array:
            scores = jnp.einsum("krh,kch->krc", query, by_head(keys))
            return scores.reshape(1, num_kv_heads * group_heads, QUERY_TILE, -1)

        def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
            weights = weights.reshape(*query.shape[:2], -1)
            mixed = jnp.einsum("krc,kch->krh", weights, by_head(values))
            return mixed.reshape(1, num_kv_heads * group_heads, QUERY_TILE, head_dim)

        shape = (1, num_kv_heads * group_heads, QUERY_TILE, head_dim)
        table, caches = _at(block_tables, seq)[None], (k_cache, v_cache)
        mixed = _online_softmax(scores_of, mix, shape, first[None], last[None], table, caches, _TILE_KEYS, soft_cap)
        mixed = mixed.reshape(num_kv_heads, group_heads, QUERY_TILE, head_dim).transpose(2, 0, 1, 3).astype(q.dtype)
        # The rows of a tile past its sequence's end belong to other sequences: leave them as they are.
        mixed = jnp.where(live[:, None, None, None], mixed, _slice(out, start, QUERY_TILE))
        return _update(out, mixed, start)

    return jax.lax.fori_loop(0, num_tiles, attend_tile, out)[:num_rows]


def _online_softmax(
    scores_of: Callable[[jax.Array], jax.Array],
    mix: Callable[[jax.Array, jax.Array], jax.Array],
    shape: tuple[int, int, int, int],
    first: jax.Array,
    last: jax.Array,
    tables: jax.Array,
    caches: tuple[jax.Array, jax.Array],
    num_keys: int,
    soft_cap: float | None,
) -> jax.Array:
    """Softmax-weighted sum of values over each row's keys first..last, num_keys tokens of every sequence a step.

    Args:
        scores_of: float32 keys [S, C, K * H] -> scores [S, N, R, C].
        mix: weights [S, N, R, C], float32 values [S, C, K * H] -> [S, N, R, W].
        shape: (S, N, R, W).
        first, last: [S, R] positions; last < first is a row without keys, whose result means nothing (but is finite
            if the sequence has any live row).
        tables: [S, M] block ids.
    """
    num_blocks, block_size, num_kv_heads, head_dim = caches[0].shape
    flat_k, flat_v = (cache.reshape(num_blocks * block_size, num_kv_heads * head_dim) for cache in caches)
    num_columns = min(max(num_keys // block_size, 1), tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % num_columns)))
    step_keys = num_columns * block_size
    slot, column = np.divmod(np.arange(step_keys, dtype=np.int32), num_columns)  # slot by slot across the blocks
    # A key that no row of its sequence may see is read from the sequence's last position instead: always a real token
    # (an unused slot may hold NaN, and 0 * NaN is NaN), and already in the CPU's cache.
    seq_first, seq_last = jnp.where(last >= first, first, jnp.int32(2**30)).min(1), last.max(1)
    end = jnp.maximum(seq_last, 0)
    end_block = _at(tables, (np.arange(len(tables)), jax.lax.div(end, block_size)))
    end_slot = end_block * block_size + jax.lax.rem(end, block_size)

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        high, total, mixed = state
        blocks = _slice(tables, index * num_columns, num_columns, axis=1)
        position = (index * num_columns + column) * block_size + slot
        read = (position >= seq_first[:, None]) & (position <= seq_last[:, None])
        slots = jnp.where(read, blocks[:, column] * block_size + slot, end_slot[:, None])
        scores = scores_of(_rows(flat_k, slots))
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = (position >= first[..., None]) & (position <= last[..., None])
        scores = jnp.where(visible[:, None], scores, _MASKED)
        new_high = jnp.maximum(high, scores.max(-1))
        weights = jnp.exp(scores - new_high[..., None])
        shrink = jnp.exp(high - new_high)
        mixed = mixed * shrink[..., None] + mix(weights, _rows(flat_v, slots))
        return new_high, total * shrink + weights.sum(-1), mixed

    zeros = jnp.zeros(shape, jnp.float32)
    state = (jnp.full_like(zeros[..., 0], _MASKED), zeros[..., 0], zeros)
    first_step = jax.lax.div(jnp.maximum(seq_first.min(), 0), step_keys)
    num_steps = jax.lax.div(seq_last.max() + step_keys, step_keys)
    _, total, mixed = jax.lax.fori_loop(first_step, num_steps, step, state)
    return mixed / jnp.maximum(total, 1e-30)[..., None]


def _rows(flat_cache: jax.Array, slots: jax.Array) -> jax.Array:
    return _at(flat_cache, slots).astype(jnp.float32)


def _at(array: jax.Array, index: Any) -> jax.Array:
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _slice(array: jax.Array, start: jax.Array, size: int, axis: int = 0) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, start, size, axis, allow_negative_indices=False)


def _update(array: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, rows, start, 0, allow_negative_indices=False)
