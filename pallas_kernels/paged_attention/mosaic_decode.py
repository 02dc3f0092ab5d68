"""Decode attention on Hopper (9.0) in Pallas Mosaic GPU: one query token a sequence, split along its context.

A program serves one KV head of one sequence over one split of its visible keys: its G query heads share the loads.
wgmma has 64 rows, of which G are used: the others cost nothing that matters, since decode waits for memory. With
several splits, each writes its normalised sum and the log of its weight, which the combine kernel of the Triton backend
adds up (Flash-Decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.mosaic_ops import ROWS, TileOps, swizzled
from pallas_kernels.paged_attention.mosaic_tiles import (
    PLAIN_COLUMNS,
    SMALLEST_TOTAL,
    TILE_KEYS,
    Keys,
    Ring,
    attend_tiles,
    drain,
    fetch_tiles,
    load_queries,
    normalized,
    parts_of,
    refusal,
)
from pallas_kernels.paged_attention.triton import combine
from pallas_kernels.paged_attention.triton_tiles import Cache

SPLIT_KEYS = 512
"""No split is made to get fewer tokens: a program's start and end would outweigh its loop."""
_MOST_SPLIT_KEYS = 16384  # so that one long context among many does not hold up the others
_MOST_SPLITS = 128  # a program of the combine kernel holds them all
_CONSUMER, _PRODUCER = 0, 1  # warpgroups


def decode(
    q: jax.Array,
    cache: Cache,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    target: Target,
    num_splits: int | None = None,
    split_keys: int = SPLIT_KEYS,
    interpret: Any = None,
) -> jax.Array:
    """See api.paged_attention_decode. q and block_tables may have rows past those of context_lens; they are not read.

    Args:
        target: what the kernel is compiled for.
        num_splits: programs for each sequence and KV head, a power of two; None fills the card.
        split_keys: no split takes fewer tokens, unless it is the last.
        interpret: mosaic_ops.interpret_params(), or None to compile.

    Raises:
        NotImplementedError: for the reasons that `refusal` gives.
    """
    reason = refusal(target, q, cache.k)
    if reason:
        raise NotImplementedError(f"Mosaic decode attention: {reason}")
    num_seqs, (num_kv_heads, group_heads, head_dim) = context_lens.shape[0], q.shape[1:]
    if num_splits is None:
        most_keys = block_tables.shape[1] * cache.k.shape[1]
        most_keys = most_keys if window is None else min(most_keys, window)
        num_splits = choose_num_splits(num_seqs * num_kv_heads, most_keys, target.num_cores)
    out_shape = (num_seqs, num_kv_heads, group_heads, head_dim)
    partial_shape = (num_seqs, num_kv_heads, num_splits, group_heads, head_dim)
    out = jax.ShapeDtypeStruct(out_shape, q.dtype)
    out_types = [out] if num_splits == 1 else [jax.ShapeDtypeStruct(partial_shape, jnp.float32)]
    plain = (ROWS, min(head_dim, PLAIN_COLUMNS))
    scratch: dict[str, Any] = {
        "ring": Ring.types(cache.k, num_consumers=1),
        "plain_q": plgpu.SMEM(plain, q.dtype),
        "q_tile": plgpu.SMEM((ROWS, head_dim), q.dtype, transforms=swizzled(q.dtype)),
        "q_full": plgpu.Barrier(),
        "out_tile": plgpu.SMEM(plain, out_types[0].dtype),
    }
    if num_splits > 1:
        out_types.append(jax.ShapeDtypeStruct((*partial_shape[:3], ROWS), jnp.float32))
        scratch["weight_tile"] = plgpu.SMEM((ROWS,), jnp.float32)
    scoring: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    results = plgpu.kernel(
        functools.partial(_kernel, TileOps(interpret is not None), num_splits, split_keys, scoring),
        out_type=out_types,
        scratch_types=scratch,
        grid=(num_seqs, num_kv_heads, num_splits),
        grid_names=("seq", "kv_head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_attention_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(q, cache.k, cache.v, block_tables, context_lens)
    return results[0] if num_splits == 1 else combine(results[0], results[1], out, interpret is not None)


def choose_num_splits(num_programs: int, most_keys: int, num_cores: int) -> int:
    """A power of two, so that few long sequences fill the card.

    Args:
        num_programs: without splits.
        most_keys: that a sequence can have, by the shape of its block table and the window.
        num_cores: of the card.
    """
    wanted = max(num_cores // num_programs, pl.cdiv(most_keys, _MOST_SPLIT_KEYS))
    splits = max(min(wanted, most_keys // SPLIT_KEYS, _MOST_SPLITS), 1)
    return 1 << (splits.bit_length() - 1)


def _kernel(
    ops: TileOps,
    num_splits: int,
    split_keys: int,
    scoring: dict[str, Any],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    context_lens: Any,
    out: Any,
    weight_out: Any = None,
    *,
    ring: Ring,
    plain_q: Any,
    q_tile: Any,
    q_full: Any,
    out_tile: Any,
    weight_tile: Any = None,
) -> None:
    seq, kv_head, split = (lax.axis_index(name) for name in ("seq", "kv_head", "split"))
    warpgroup = lax.axis_index("warpgroup")
    keys = _split_keys(context_lens[seq], scoring["window"], split, num_splits, split_keys)

    @pl.when(warpgroup == _PRODUCER)
    def produce() -> None:
        fetch_tiles(ring, (k_cache, v_cache), block_tables.at[seq], kv_head, keys)
        drain(ring, keys.num_tiles)

    @pl.when(warpgroup == _CONSUMER)
    def consume() -> None:
        load_queries(ops, lambda columns: q.at[seq, kv_head, :, columns], plain_q, q_tile, q_full)

        def visible(first_key: jax.Array) -> jax.Array:
            key = first_key + ops.iota(TILE_KEYS, 1)
            return (key >= keys.first) & (key <= keys.last)

        high, total, mixed = attend_tiles(ops, ring, q_tile, keys, visible, _CONSUMER, **scoring)
        mixed = normalized(mixed, total)
        place = (seq, kv_head) if num_splits == 1 else (seq, kv_head, split)
        for columns in parts_of(q.shape[3], out_tile.shape[1]):
            part = lax.slice(mixed, (0, columns.start), (ROWS, columns.start + columns.size))
            ops.store(out_tile, part.astype(out_tile.dtype), plain=True)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, q.shape[2])], out.at[*place, :, columns])
            plgpu.wait_smem_to_gmem(0)
        if weight_out is not None:
            weight_tile[...] = high + jnp.log2(jnp.maximum(total, SMALLEST_TOTAL))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(weight_tile, weight_out.at[place])
            plgpu.wait_smem_to_gmem(0)


def _split_keys(context: jax.Array, window: int | None, split: jax.Array, num_splits: int, split_keys: int) -> Keys:
    """Each split takes the same number of tiles, but for the last ones."""
    last = context - 1
    first = jnp.int32(0) if window is None else jnp.maximum(context - window, 0)
    first_tile = lax.div(first, TILE_KEYS)
    num_tiles = lax.div(last + TILE_KEYS, TILE_KEYS) - first_tile
    share = jnp.maximum(lax.div(num_tiles + (num_splits - 1), num_splits), split_keys // TILE_KEYS)
    skipped = split * share
    return Keys(first, last, first, last, first_tile + skipped, jnp.clip(num_tiles - skipped, 0, share))
