"""Paged attention of a mixed step on Hopper (9.0) in Pallas Mosaic GPU: decodes by mosaic_decode, prompt chunks here.

A program takes the rows of one tile for some query heads of one KV head, a head for each consumer warpgroup; they share
the K/V tiles (FlashAttention-3: Shah et al. 2024, arXiv:2407.08608). As many programs as the card has cores each work
through several such items: while consumers finish one, the producer fetches for the next, and a step with few tiles
costs nothing for those it could have had.

JAX's own attention kernel for Mosaic refuses causal masks with CUDA 12.8 to 12.9.0, whose ptxas miscompiles its loops.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.mosaic_decode import decode
from pallas_kernels.paged_attention.mosaic_ops import ROWS, TileOps, swizzled
from pallas_kernels.paged_attention.mosaic_tiles import (
    PLAIN_COLUMNS,
    TILE_KEYS,
    Keys,
    Ring,
    attend_tiles,
    drain,
    fetch_tiles,
    load_queries,
    normalized,
    parts_of,
)
from pallas_kernels.paged_attention.mosaic_tiles import refusal as common_refusal
from pallas_kernels.paged_attention.reference import QUERY_TILE
from pallas_kernels.paged_attention.triton_tiles import Cache

assert QUERY_TILE == ROWS, "a tile of queries is a tile of wgmma"
_HEAD_DIMS = (64, 128)
_MOST_CONSUMERS = 2
# Registers of a thread: three warpgroups start with 168 each, the consumers take what the producer gives back.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 232, 40


class Chunks(NamedTuple):
    """Which rows are whose, see api.py: arrays outside a kernel, refs inside."""

    context_lens: Any
    query_starts: Any
    query_lens: Any
    tile_seq: Any
    tile_row: Any
    num_tiles: Any  # [1]


class Item(NamedTuple):
    """One piece of a program's work: a tile of queries, and query heads of a KV head; int32 scalars."""

    seq: jax.Array
    kv_head: jax.Array
    first_head: jax.Array  # of the KV head's G, for the first consumer
    row: jax.Array
    num_rows: jax.Array
    position: jax.Array  # of `row` in its sequence


def refusal(target: Target, q: Any, k_cache: Any) -> str | None:
    """Why this kernel cannot serve the call when compiled for `target`; None if it can."""
    if q.shape[3] not in _HEAD_DIMS:
        return f"head width {q.shape[3]}: has {_HEAD_DIMS}; the sums of wider ones take too many registers"
    return common_refusal(target, q, k_cache)


def ragged(
    q: jax.Array,
    cache: Cache,
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
    target: Target,
    num_programs: int | None = None,
    interpret: Any = None,
    **decode_options: Any,
) -> jax.Array:
    """See api.paged_attention_ragged.

    Args:
        num_programs: None is one for each core of the card.
        target, interpret: as for mosaic_decode.decode, which gets `decode_options`.

    Raises:
        NotImplementedError: for the reasons that `refusal` gives.
    """
    reason = refusal(target, q, cache.k)
    if reason:
        raise NotImplementedError(f"Mosaic ragged attention: {reason}")
    scoring: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap}
    num_rows, num_seqs = q.shape[0], context_lens.shape[0]
    most_decodes = min(num_rows, num_seqs)
    decode_lens = jnp.where(jnp.arange(most_decodes) < num_decodes, context_lens[:most_decodes], 0)
    launch: dict[str, Any] = {"target": target, "interpret": interpret}
    decoded = decode(q, cache, block_tables, decode_lens, **scoring, **launch, **decode_options)
    chunks = Chunks(context_lens, query_starts, query_lens, tile_seq, tile_row, num_tiles.reshape(1))
    attended = _attend_chunks(q, cache, block_tables, chunks, scoring, num_programs, **launch)
    row, end = jnp.arange(num_rows)[:, None], query_starts + query_lens
    in_chunk = (row >= query_starts) & (row < end) & (jnp.arange(num_seqs) >= num_decodes)
    decoded = jnp.pad(decoded, ((0, num_rows - most_decodes), (0, 0), (0, 0), (0, 0)))
    return jnp.where(in_chunk.any(1)[:, None, None, None], attended, decoded)


def _attend_chunks(
    q: jax.Array,
    cache: Cache,
    block_tables: jax.Array,
    chunks: Chunks,
    scoring: dict[str, Any],
    num_programs: int | None,
    target: Target,
    interpret: Any,
) -> jax.Array:
    """[T, K, G, H] as api.paged_attention_ragged; rows of decodes and of no sequence hold anything."""
    num_rows, num_kv_heads, group_heads, head_dim = q.shape
    num_consumers = min(group_heads, _MOST_CONSUMERS)
    most_items = chunks.tile_seq.shape[0] * num_kv_heads * pl.cdiv(group_heads, num_consumers)
    padded_q = jnp.pad(q, ((0, max(ROWS - num_rows, 0)), (0, 0), (0, 0), (0, 0)))  # a copy is no larger than its source
    scratch: dict[str, Any] = {
        "ring": Ring.types(cache.k, num_consumers),
        "plain_tiles": plgpu.SMEM((num_consumers, ROWS, min(head_dim, PLAIN_COLUMNS)), q.dtype),
        "q_tiles": plgpu.SMEM((num_consumers, ROWS, head_dim), q.dtype, transforms=swizzled(q.dtype)),
        "q_full": plgpu.Barrier(num_barriers=num_consumers),
    }
    return plgpu.kernel(
        functools.partial(_kernel, TileOps(interpret is not None), scoring),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(min(num_programs or target.num_cores, most_items),),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention_ragged",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )(padded_q, cache.k, cache.v, block_tables, *chunks)


def _kernel(
    ops: TileOps,
    scoring: dict[str, Any],
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_tables: Any,
    *refs: Any,
    ring: Ring,
    plain_tiles: Any,
    q_tiles: Any,
    q_full: Any,
) -> None:
    chunks, out = Chunks(*refs[:-1]), refs[-1]
    warpgroup, num_consumers = lax.axis_index("warpgroup"), q_tiles.shape[0]
    program, num_programs = lax.axis_index("program"), lax.axis_size("program")
    _, num_kv_heads, group_heads, _ = q.shape
    items_per_tile = num_kv_heads * pl.cdiv(group_heads, num_consumers)
    num_items = lax.div(chunks.num_tiles[0] * items_per_tile - program + (num_programs - 1), num_programs)

    def for_each_item(work: Any) -> jax.Array:
        """work(item, keys, K/V tiles done before); returns the number of K/V tiles of all items."""

        def step(index: jax.Array, num_done: jax.Array) -> jax.Array:
            item = _item(chunks, program + index * num_programs, num_kv_heads, items_per_tile, num_consumers)
            keys = _keys(item, scoring["window"])
            work(item, keys, num_done)
            return num_done + keys.num_tiles

        return lax.fori_loop(0, num_items, step, jnp.int32(0))

    @pl.when(warpgroup == num_consumers)
    def produce_all() -> None:
        if num_consumers > 1:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        def produce(item: Item, keys: Keys, num_done: jax.Array) -> None:
            fetch_tiles(ring, (k_cache, v_cache), block_tables.at[item.seq], item.kv_head, keys, num_done)

        drain(ring, for_each_item(produce))

    @pl.when(warpgroup < num_consumers)
    def consume_all() -> None:
        if num_consumers > 1:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        plain_tile, q_tile, full = plain_tiles.at[warpgroup], q_tiles.at[warpgroup], q_full.at[warpgroup]

        def consume(item: Item, keys: Keys, num_done: jax.Array) -> None:
            own_head = item.first_head + warpgroup
            head = jnp.minimum(own_head, group_heads - 1)  # one too many for an odd G: works, but writes nothing
            rows = pl.ds(item.row, ROWS)
            load_queries(ops, lambda columns: q.at[rows, item.kv_head, head, columns], plain_tile, q_tile, full)
            visible = functools.partial(_visible, ops, item.position, scoring["window"])
            _, total, mixed = attend_tiles(ops, ring, q_tile, keys, visible, warpgroup, num_done, **scoring)
            mixed = normalized(mixed, total)
            for columns in parts_of(q_tile.shape[1], plain_tile.shape[1]):
                part = lax.slice(mixed, (0, columns.start), (ROWS, columns.start + columns.size))
                ops.store(plain_tile, part.astype(plain_tile.dtype), plain=True)
                plgpu.commit_smem()
                destination = out.at[:, item.kv_head, head, columns]
                pl.when(own_head < group_heads)(functools.partial(_write_rows, plain_tile, destination, item))
                plgpu.wait_smem_to_gmem(0)

        for_each_item(consume)


def _item(chunks: Chunks, index: jax.Array, num_kv_heads: int, items_per_tile: int, num_consumers: int) -> Item:
    tile, rest = lax.div(index, items_per_tile), lax.rem(index, items_per_tile)
    parts_of_group = items_per_tile // num_kv_heads
    seq, row = chunks.tile_seq[tile], chunks.tile_row[tile]
    num_rows_left = chunks.query_starts[seq] + chunks.query_lens[seq] - row
    position = chunks.context_lens[seq] - num_rows_left
    first_head = lax.rem(rest, parts_of_group) * num_consumers
    return Item(seq, lax.div(rest, parts_of_group), first_head, row, jnp.minimum(num_rows_left, ROWS), position)


def _keys(item: Item, window: int | None) -> Keys:
    last = item.position + item.num_rows - 1
    first = first_of_all = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(item.position - (window - 1), 0)
        first_of_all = jnp.maximum(last - (window - 1), 0)
    first_tile = lax.div(first, TILE_KEYS)
    num_tiles = lax.div(last, TILE_KEYS) + 1 - first_tile
    return Keys(first, last, first_of_all, item.position, first_tile, num_tiles)


def _visible(ops: TileOps, position: jax.Array, window: int | None, first_key: jax.Array) -> jax.Array:
    key = first_key + ops.iota(TILE_KEYS, 1)
    row_position = position + ops.iota(TILE_KEYS, 0)
    seen = key <= row_position
    return seen if window is None else seen & (key > row_position - window)


def _write_rows(plain_tile: Any, destination: Any, item: Item) -> None:
    """Only the tile's own rows: those behind belong to other sequences."""

    @pl.when(item.num_rows == ROWS)
    def write_whole() -> None:
        plgpu.copy_smem_to_gmem(plain_tile, destination.at[pl.ds(item.row, ROWS)])

    @pl.when(item.num_rows < ROWS)
    def write_rows() -> None:
        def write(index: jax.Array, _: None) -> None:
            source = plain_tile.at[pl.ds(index, 1)]
            plgpu.copy_smem_to_gmem(source, destination.at[pl.ds(item.row + index, 1)])

        lax.fori_loop(0, item.num_rows, write, None)
