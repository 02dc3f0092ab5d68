"""Paged attention in plain jax.numpy: the CPU path, and what the kernels are checked against."""

import jax
import jax.numpy as jnp

QUERY_TILE = 64
_MASKED = -1e30


def _attend(q, first, last, tables, k_cache, v_cache, *, scale, soft_cap):
    """q [S,R,K,G,H]; row sees keys first..last (inclusive, [S,R]); online softmax over block columns."""
    num_seqs, rows, num_kv, group, width = q.shape
    block_size = k_cache.shape[1]
    q = q.astype(jnp.float32) * scale

    def step(column, state):
        high, total, acc = state
        blocks = tables[:, column]
        key = k_cache[blocks].astype(jnp.float32)
        score = jnp.einsum("srkgh,spkh->srkgp", q, key)
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        position = column * block_size + jnp.arange(block_size)
        live = (position >= first[..., None]) & (position <= last[..., None])
        score = jnp.where(live[:, :, None, None], score, _MASKED)
        value = jnp.where(live.any(1)[:, :, None, None], v_cache[blocks].astype(jnp.float32), 0.0)
        new_high = jnp.maximum(high, score.max(-1))
        weight = jnp.where(live[:, :, None, None], jnp.exp(score - new_high[..., None]), 0.0)
        shrink = jnp.exp(high - new_high)
        acc = acc * shrink[..., None] + jnp.einsum("srkgp,spkh->srkgh", weight, value)
        return new_high, total * shrink + weight.sum(-1), acc

    shape = (num_seqs, rows, num_kv, group)
    state = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, width)))
    start = jnp.maximum(first.min(), 0) // block_size
    stop = (last.max() + block_size) // block_size
    _, total, acc = jax.lax.fori_loop(start, stop, step, state)
    return acc / jnp.maximum(total, 1e-30)[..., None]


def decode(q, k_cache, v_cache, block_tables, context_lens, *, scale, window, soft_cap):
    """See api.paged_attention_decode."""
    last = context_lens[:, None] - 1
    first = jnp.zeros_like(last) if window is None else last - window + 1
    out = _attend(q[:, None], first, last, block_tables, k_cache, v_cache, scale=scale, soft_cap=soft_cap)
    return out[:, 0].astype(q.dtype)


def ragged(q, k_cache, v_cache, block_tables, context_lens, query_starts, query_lens, num_decodes, tile_seq, tile_row,
           num_tiles, *, scale, window, soft_cap):
    """See api.paged_attention_ragged."""
    num_rows = q.shape[0]
    options = {"scale": scale, "soft_cap": soft_cap}
    few = min(num_rows, block_tables.shape[0])
    lens = jnp.where(jnp.arange(few) < num_decodes, context_lens[:few], 0)
    decoded = decode(q[:few], k_cache, v_cache, block_tables[:few], lens, window=window, **options)
    padded = jnp.pad(q, ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros_like(padded).at[:few].set(decoded)

    def step(tile, out):
        seq, row = tile_seq[tile], tile_row[tile]
        rows = row + jnp.arange(QUERY_TILE)
        live = rows < query_starts[seq] + query_lens[seq]
        last = jnp.where(live, context_lens[seq] - query_lens[seq] + rows - query_starts[seq], -1)
        first = jnp.zeros_like(last) if window is None else last - window + 1
        tile_q = jax.lax.dynamic_slice_in_dim(padded, row, QUERY_TILE)
        new = _attend(tile_q[None], first[None], last[None], block_tables[seq][None], k_cache, v_cache, **options)[0]
        old = jax.lax.dynamic_slice_in_dim(out, row, QUERY_TILE)
        new = jnp.where(live[:, None, None, None], new.astype(q.dtype), old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, row, 0)

    return jax.lax.fori_loop(0, num_tiles, step, out)[:num_rows]
