"""Paged attention of a mixed step through Triton: the decodes by the decode kernel, prompt chunks by one of their own.

One program takes some rows of one sequence and the G query heads of one KV head, folded into the M rows of its
products, and walks the keys that they see (FlashAttention-2: arXiv:2307.08691). Tiles of keys that every row sees, most
of them, need no mask.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.reference import QUERY_TILE
from pallas_kernels.paged_attention.triton import DecodeTiles, decode
from pallas_kernels.paged_attention.triton_launch import call, has_native_fp8, product_dtype, tuned
from pallas_kernels.paged_attention.triton_tiles import (
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


@dataclass(frozen=True)
class RaggedTiles:
    """Sizes of the ragged kernel: pallas_kernels/tuning/paged_attention.json.

    Attributes:
        rows: M, query rows times query heads of a program; a power of two.
        keys: tokens of a tile of keys.
        num_warps, num_stages: of a program; stages are tiles of keys in flight.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Chunks(NamedTuple):
    """Which rows are whose, see api.py: arrays outside a kernel, refs inside."""

    context_lens: Any
    query_starts: Any
    query_lens: Any
    tile_seq: Any
    tile_row: Any
    num_tiles: Any


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
    tiles: RaggedTiles | None = None,
    decode_tiles: DecodeTiles | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See api.paged_attention_ragged; for the other arguments triton.decode, which gets `decode_tiles`."""
    scores: dict[str, Any] = dict(scale=scale, window=window, soft_cap=soft_cap)
    num_rows, num_kv_heads, group_heads, _ = q.shape
    most_decodes = min(num_rows, context_lens.shape[0])
    decode_lens = jnp.where(jnp.arange(most_decodes) < num_decodes, context_lens[:most_decodes], 0)
    options: dict[str, Any] = dict(target=target, tiles=decode_tiles, num_rows=num_rows, interpret=interpret)
    decoded = decode(q, cache, block_tables, decode_lens, **scores, **options)

    tiles = tiles or RaggedTiles(**tuned("ragged", target, q, cache.k))
    # A program for each piece of a step full of rows, and one more for each core; where there are more pieces, which
    # many short chunks make, programs take several. One for each tile that there could be would mostly find nothing.
    program_rows = _program_rows(tiles, group_heads)
    most_pieces = tile_seq.shape[0] * (QUERY_TILE // program_rows)
    num_programs = min(most_pieces, cdiv(num_rows, program_rows) + cdiv(target.num_cores, num_kv_heads))
    [out] = call(
        functools.partial(
            _ragged_kernel,
            num_decoded=most_decodes,
            tiles=tiles,
            variant=Variant(**scores, native_fp8=has_native_fp8(target)),
        ),
        "paged_attention_ragged",
        (num_kv_heads, num_programs),
        (
            decoded,
            q,
            cache,
            block_tables,
            Chunks(context_lens, query_starts, query_lens, tile_seq, tile_row, num_tiles[None]),
        ),
        [jax.ShapeDtypeStruct(q.shape, q.dtype)],
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        aliases={0: 0},
    )
    return out


def _program_rows(tiles: RaggedTiles, group_heads: int) -> int:
    return min(max(tiles.rows // pl.next_power_of_2(group_heads), 1), QUERY_TILE)


def _ragged_kernel(
    _decoded_ref: Any,
    q_ref: Any,
    cache: Cache,
    tables_ref: Any,
    chunks: Chunks,
    out_ref: Any,
    *,
    num_decoded: int,
    tiles: RaggedTiles,
    variant: Variant,
) -> None:
    """The host's tiles, each in pieces of `program_rows` rows: every num_programs-th piece, for one KV head."""
    program_rows = _program_rows(tiles, q_ref.shape[2])
    pieces_per_tile = QUERY_TILE // program_rows
    head, program, num_programs = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    _clear_unused_rows(chunks, out_ref, num_decoded, program_rows)  # first: what it needs then takes no registers below

    def attend_piece(index: jax.Array, _carry: None) -> None:
        piece = program + index * num_programs
        tile = lax.div(piece, pieces_per_tile)
        seq, tile_row = plt.load(chunks.tile_seq.at[tile]), plt.load(chunks.tile_row.at[tile])
        sequence_end = plt.load(chunks.query_starts.at[seq]) + plt.load(chunks.query_lens.at[seq])
        begin = tile_row + lax.rem(piece, pieces_per_tile) * program_rows
        end = jnp.minimum(begin + program_rows, sequence_end)
        offset = plt.load(chunks.context_lens.at[seq]) - sequence_end

        @pl.when(begin < end)
        def _() -> None:
            rows = _Rows(seq, head, begin, end, offset)
            _attend_rows(rows, q_ref, cache, tables_ref, out_ref, tiles, variant)

    num_pieces = chunks.num_tiles[0] * pieces_per_tile
    lax.fori_loop(0, cdiv(num_pieces - program, num_programs), attend_piece, None)


def _clear_unused_rows(chunks: Chunks, out_ref: Any, num_decoded: int, program_rows: int) -> None:
    """Puts 0 into rows behind those of all sequences, in pieces as above; of num_decoded, the decode kernel did so."""
    head, program, num_programs = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    num_rows, _, group_heads, head_dim = out_ref.shape
    first = jnp.maximum(_end_of_sequences(chunks), num_decoded)

    def clear_piece(index: jax.Array, _carry: None) -> None:
        begin = first + (program + index * num_programs) * program_rows
        row, group_head = _fold(begin, program_rows, group_heads)
        zeros = jnp.zeros((row.size, padded(head_dim)), out_ref.dtype)
        store_heads(out_ref, row, head, group_head, values=zeros, mask=(row < num_rows) & (group_head < group_heads))

    num_pieces = cdiv(num_rows - first, program_rows)
    lax.fori_loop(0, cdiv(num_pieces - program, num_programs), clear_piece, None)


def _end_of_sequences(chunks: Chunks) -> jax.Array:
    """The first row behind those of all sequences."""
    num_seqs = chunks.context_lens.shape[0]
    seq = jnp.arange(pl.next_power_of_2(num_seqs), dtype=jnp.int32)
    arrays = chunks.context_lens, chunks.query_starts, chunks.query_lens
    context, start, length = (plt.load(array.at[seq], mask=seq < num_seqs, other=0) for array in arrays)
    return jnp.where(context > 0, start + length, 0).max()


def _fold(begin: jax.Array, num_rows: int, group_heads: int) -> tuple[jax.Array, jax.Array]:
    """[M, 1] rows and query heads: `num_rows` from `begin` on times the G heads and those that make up a power of 2."""
    group = pl.next_power_of_2(group_heads)
    folded = jnp.arange(num_rows * group, dtype=jnp.int32)[:, None]
    return begin + lax.div(folded, group), lax.rem(folded, group)


class _Rows(NamedTuple):
    """Query rows begin .. end-1 of a sequence, for one KV head; a row's position in the sequence is row + offset."""

    seq: jax.Array
    head: jax.Array
    begin: jax.Array
    end: jax.Array
    offset: jax.Array


def _attend_rows(
    rows: _Rows, q_ref: Any, cache: Cache, tables_ref: Any, out_ref: Any, tiles: RaggedTiles, variant: Variant
) -> None:
    group_heads, head_dim = q_ref.shape[2:]
    dtype = product_dtype(q_ref, cache.k)
    row, group_head = _fold(rows.begin, _program_rows(tiles, group_heads), group_heads)
    # A row past the end, and a head past G, repeats the last one: it sees keys as any other, and is not stored.
    read_row, read_head = jnp.minimum(row, rows.end - 1), jnp.minimum(group_head, group_heads - 1)
    query = load_heads(q_ref, read_row, rows.head, read_head).astype(dtype)
    position = read_row + rows.offset

    def visible(key: jax.Array) -> jax.Array:
        seen = key[None] <= position
        return seen if variant.window is None else seen & (key[None] > position - variant.window)

    first, last = rows.begin + rows.offset, rows.end - 1 + rows.offset
    start = jnp.int32(0) if variant.window is None else jnp.maximum(first - variant.window + 1, 0)
    keys = KeyTiles(cache, tables_ref, rows.seq, rows.head, start, last, tiles.keys, dtype)
    softmax = Softmax.empty(row.size, head_dim)
    whole_begin, whole_end, num_tiles = _tile_range(start, first, last, tiles.keys, variant.window)
    if variant.window is not None:
        softmax = attend(softmax, query, keys, jnp.int32(0), whole_begin, variant, visible)
    softmax = attend(softmax, query, keys, whole_begin, whole_end, variant, None)
    softmax = attend(softmax, query, keys, whole_end, num_tiles, variant, visible)

    mask = (row < rows.end) & (group_head < group_heads)
    store_heads(out_ref, row, rows.head, group_head, values=softmax.result(), mask=mask)


def _tile_range(
    start: jax.Array, first: jax.Array, last: jax.Array, keys: int, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles of keys from position `start` on for queries at first .. last: begin and end of those that every query
    sees as a whole, and how many there are in all."""
    num_tiles = cdiv(last + 1 - start, keys)
    if window is None:
        return jnp.int32(0), lax.div(first + 1 - start, keys), num_tiles
    begin = jnp.minimum(cdiv(jnp.maximum(last - window + 1 - start, 0), keys), num_tiles)
    return begin, jnp.maximum(lax.div(first + 1 - start, keys), begin), num_tiles
