"""Paged attention as Pallas kernels through Triton: the decode kernel, and the kernel that combines its splits.

One program of the decode kernel serves the G query heads of one KV head of one sequence, over one split of the visible
keys (Flash-Decoding: https://crfm.stanford.edu/2023/10/12/flashdecoding.html). With one split it writes the output;
with more, float32 results and what they weigh, which the second kernel adds up.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.triton_launch import call, has_native_fp8, product_dtype, tuned
from pallas_kernels.paged_attention.triton_tiles import (
    SMALLEST_DOT,
    Cache,
    KeyTiles,
    Softmax,
    Variant,
    attend,
    cdiv,
    load_heads,
    padded,
    store_heads,
)

_MOST_SPLITS = 128  # a program of the combine kernel holds them all


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of the decode kernel: pallas_kernels/tuning/paged_attention.json.

    Attributes:
        keys: tokens of a tile.
        num_warps, num_stages: of a program; stages are tiles in flight.
        programs_per_core: splits are made until there are as many.
        split_keys: no split is made to get below this many tokens.
        most_split_keys: contexts are split until no split may be longer than this.
    """

    keys: int
    num_warps: int
    num_stages: int
    programs_per_core: int
    split_keys: int
    most_split_keys: int


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
    tiles: DecodeTiles | None = None,
    num_splits: int | None = None,
    num_rows: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention_decode. q and block_tables may have rows past those of context_lens; they are not read.

    Args:
        target: what the kernels are compiled for.
        tiles, num_splits: instead of the tuned ones; num_splits is a power of two.
        num_rows: of the result, if more than there are sequences; the others hold anything.
        interpret: run in Pallas' interpreter, on any platform.
    """
    num_kv_heads, group_heads, head_dim = q.shape[1:]
    num_seqs, most_keys = context_lens.shape[0], block_tables.shape[1] * cache.k.shape[1]
    tiles = tiles or DecodeTiles(**tuned("decode", target, q, cache.k))
    if num_splits is None:
        most_keys = most_keys if window is None else min(most_keys, window)
        num_splits = choose_num_splits(num_seqs * num_kv_heads, most_keys, target.num_cores, tiles)
    out = jax.ShapeDtypeStruct((num_rows or num_seqs, num_kv_heads, group_heads, head_dim), q.dtype)
    partial = (num_seqs, num_kv_heads, num_splits, group_heads)
    partials = [jax.ShapeDtypeStruct((*partial, head_dim), jnp.float32), jax.ShapeDtypeStruct(partial, jnp.float32)]
    variant = Variant(scale, window, soft_cap, has_native_fp8(target))
    results = call(
        functools.partial(_decode_kernel, tiles=tiles, num_splits=num_splits, variant=variant),
        "paged_attention_decode",
        (num_kv_heads, num_seqs, num_splits),
        (q, cache, block_tables, context_lens),
        partials if num_splits > 1 else [out],
        interpret=interpret,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return results[0] if num_splits == 1 else combine(results[0], results[1], out, interpret)


def choose_num_splits(num_programs: int, most_keys: int, num_cores: int, tiles: DecodeTiles) -> int:
    """A power of two, so that few long sequences fill the card and one among many does not hold up the others.

    Args:
        num_programs: without splits.
        most_keys: that a sequence can have, by the shape of its block table and the window.
        num_cores: of the card.
    """
    to_fill = tiles.programs_per_core * num_cores // num_programs
    wanted = max(to_fill, cdiv(most_keys, tiles.most_split_keys))
    splits = max(min(wanted, most_keys // tiles.split_keys, _MOST_SPLITS), 1)
    return 1 << (splits.bit_length() - 1)


def _decode_kernel(
    q_ref: Any,
    cache: Cache,
    tables_ref: Any,
    lens_ref: Any,
    out_ref: Any,
    weight_ref: Any = None,
    *,
    tiles: DecodeTiles,
    num_splits: int,
    variant: Variant,
) -> None:
    head, seq, split = (pl.program_id(axis) for axis in range(3))
    group_heads, head_dim = q_ref.shape[2:]
    length = plt.load(lens_ref.at[seq])
    begin, end = _split_range(length, split, num_splits, tiles, variant.window)

    dtype = product_dtype(q_ref, cache.k)
    group_head = jnp.arange(max(pl.next_power_of_2(group_heads), SMALLEST_DOT), dtype=jnp.int32)
    query_head = jnp.minimum(group_head, group_heads - 1)[:, None]
    query = load_heads(q_ref, seq, head, query_head).astype(dtype)

    keys = KeyTiles(cache, tables_ref, seq, head, begin, jnp.maximum(end - 1, 0), tiles.keys, dtype)
    softmax = Softmax.empty(group_head.size, head_dim)
    num_tiles = cdiv(end - begin, tiles.keys)
    softmax = attend(softmax, query, keys, jnp.int32(0), num_tiles, variant, lambda position: (position < end)[None])

    index = (seq, head) if num_splits == 1 else (seq, head, split)
    is_head = group_head < group_heads
    store_heads(out_ref, *index, group_head[:, None], values=softmax.result(), mask=is_head[:, None])
    if num_splits > 1:
        plt.store(weight_ref.at[*index, group_head], softmax.log2_total(), mask=is_head)


def _split_range(
    length: jax.Array, split: jax.Array, num_splits: int, tiles: DecodeTiles, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Positions begin .. end-1 that a split takes; none if end <= begin."""
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    keys = jnp.maximum(cdiv(cdiv(length - first, num_splits), tiles.keys) * tiles.keys, tiles.split_keys)
    begin = first + split * keys
    return begin, jnp.minimum(begin + keys, length)


def combine(partial: jax.Array, weight: jax.Array, out: jax.ShapeDtypeStruct, interpret: bool) -> jax.Array:
    """The splits' results [S, K, splits, G, H] as one [S or more, K, G, H], by what they weigh [S, K, splits, G]."""
    num_seqs, num_kv_heads, num_splits, group_heads, head_dim = partial.shape
    # A program holds [num_splits, H] numbers: at most 32 registers a thread for them, where 8 warps suffice.
    num_warps = min(max(num_splits * padded(head_dim) // 1024, 1), 8)
    [combined] = call(
        _combine_kernel,
        "paged_attention_combine",
        (group_heads, num_kv_heads, num_seqs),
        (partial, weight),
        [out],
        interpret=interpret,
        num_warps=num_warps,
        num_stages=1,
    )
    return combined


def _combine_kernel(partial_ref: Any, weight_ref: Any, out_ref: Any) -> None:
    group_head, head, seq = (pl.program_id(axis) for axis in range(3))
    split = jnp.arange(partial_ref.shape[2], dtype=jnp.int32)
    weight = plt.load(weight_ref.at[seq, head, split, group_head])
    weight = jnp.exp2(weight - weight.max())
    weight = weight / weight.sum()
    partials = load_heads(partial_ref, seq, head, split[:, None], group_head)
    mixed = (partials * weight[:, None]).sum(axis=0, keepdims=True)
    store_heads(out_ref, seq, head, jnp.full((1, 1), group_head), values=mixed, mask=jnp.full((1, 1), True))
