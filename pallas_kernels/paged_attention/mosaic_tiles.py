"""Parts that the Mosaic attention kernels share: a ring of K/V tiles in shared memory, and online softmax over it.

The last warpgroup of a program fetches, the others consume:

    producer   wait free[slot]  ->  one bulk copy (TMA) a cache block  ->  full[slot] completes
    consumers  wait full[slot]  ->  wgmma, softmax                     ->  arrive at free[slot]

K and V have their own barriers: a K slot is refilled while softmax and the product with V still run.
The online softmax is that of FlashAttention (Dao et al. 2022, arXiv:2205.14135; for Hopper 2024, arXiv:2407.08608).

JAX 0.10.2 and 0.12 both compile these kernels for 9.0, and interpret them with race detection; the interpreter does not
see the swizzled products themselves (mosaic_ops). They have not run on a GPU yet.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention.mosaic_ops import TileOps, swizzled

TILE_KEYS = 64
"""Tokens of a K or V tile."""
PLAIN_COLUMNS = 128
"""Columns of tiles on their way in and out; wider heads go in parts, to save shared memory."""
SMALLEST_TOTAL = 1e-30
# Tiles in flight, by head width: what fits beside queries and output, with at least 64 KB on their way.
STAGES = {64: 6, 128: 4, 256: 2}

_MASKED = -1e30  # finite: a tile that is masked as a whole must not make NaN; a later real score scales it away
_LOG2_E = math.log2(math.e)
_CLEAR_COLUMNS = 64
_BLOCK_SIZES = (16, 32)
_MOST_GROUP_HEADS = 16


class Ring(NamedTuple):
    """Slots for K and V tiles; as types for allocation, then as refs inside the kernel."""

    k: Any  # [stages, TILE_KEYS, H]
    v: Any
    k_full: Any  # [stages] barriers
    v_full: Any
    k_free: Any
    v_free: Any
    cleared: Any  # one barrier: the first consumer has zeroed rows of a V tile

    @classmethod
    def types(cls, cache: Any, num_consumers: int) -> "Ring":
        _, block_size, _, head_dim = cache.shape
        num_stages = STAGES[head_dim]
        shape = (num_stages, TILE_KEYS, head_dim)
        tiles = plgpu.SMEM(shape, cache.dtype, transforms=swizzled(cache.dtype))
        full = plgpu.Barrier(num_arrivals=TILE_KEYS // block_size, num_barriers=num_stages)
        free = plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages)
        return cls(tiles, tiles, full, full, free, free, cleared=plgpu.Barrier(num_arrivals=num_consumers))


class Keys(NamedTuple):
    """Which keys the rows of a program see, and which tiles of them it walks; int32 scalars."""

    first: Any  # of any row
    last: Any
    first_of_all: Any  # seen by every row, if first_of_all <= last_of_all
    last_of_all: Any
    first_tile: Any
    num_tiles: Any


def refusal(target: Target, q: Any, k_cache: Any) -> str | None:
    """Why these kernels cannot serve the call when compiled for `target`; None if they can."""
    _, block_size, _, head_dim = k_cache.shape
    if target.capability is not None and target.capability[0] != 9:
        return "needs compute capability 9.0, not {}.{}: wgmma is Hopper's alone".format(*target.capability)
    if k_cache.dtype not in (jnp.bfloat16, jnp.float16) or q.dtype != k_cache.dtype:
        return f"q {q.dtype} and k_cache {k_cache.dtype}: must both be bfloat16 or both float16"
    if head_dim not in STAGES:
        return f"head width {head_dim}: has {sorted(STAGES)}"
    if block_size not in _BLOCK_SIZES:
        return f"block size {block_size}: has {sorted(_BLOCK_SIZES)}"
    if q.shape[2] > _MOST_GROUP_HEADS:
        return f"{q.shape[2]} query heads for each KV head: has up to {_MOST_GROUP_HEADS}"
    return None


def load_queries(ops: TileOps, rows_of: Callable[[Any], Any], plain_tile: Any, q_tile: Any, full: Any) -> None:
    """Queries to the first rows of `q_tile`, which is swizzled; the other rows hold anything.

    By way of plain rows: a copy into a swizzled tile goes by groups of 8 rows also where it starts, and would silently
    round the start down.

    Args:
        rows_of: columns -> ref of the queries in global memory, [up to ROWS, columns].
        plain_tile: [ROWS, a part of H] in shared memory.
    """
    for columns in parts_of(q_tile.shape[1], plain_tile.shape[1]):
        source, part = rows_of(columns), q_tile.at[:, columns]
        plgpu.copy_gmem_to_smem(source, plain_tile.at[pl.ds(0, source.shape[0])], full)
        plgpu.barrier_wait(full)
        ops.store(part, ops.load(plain_tile, plain=True))
        plgpu.commit_smem()


def parts_of(width: int, part_width: int) -> list[Any]:
    """Slices that cut `width` columns."""
    return [pl.ds(start, part_width) for start in range(0, width, part_width)]


def await_full(barrier: Any) -> None:
    plgpu.barrier_wait(barrier)


def await_free(barrier: Any) -> None:
    plgpu.barrier_wait(barrier)


def fetch_tiles(
    ring: Ring, caches: tuple[Any, Any], table: Any, kv_head: jax.Array, keys: Keys, num_done: Any = 0
) -> None:
    """The producer: fills the ring with the tiles of `keys`, block by block of the table row `table` [M].

    Args:
        num_done: tiles that this program has sent through the ring before.
    """
    num_stages, block_size = ring.k.shape[0], caches[0].shape[1]
    blocks_per_tile = TILE_KEYS // block_size
    last_column = lax.div(jnp.maximum(keys.last, 0), block_size)

    def blocks_of(index: jax.Array | int) -> tuple[jax.Array, ...]:
        # Past the context its last block is read again: barriers count whole tiles, and what is read is masked.
        column = (keys.first_tile + index) * blocks_per_tile
        return tuple(table[jnp.minimum(column + part, last_column)] for part in range(blocks_per_tile))

    def fetch(index: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        next_blocks = blocks_of(index + 1)  # by the time they are needed they are here
        turn = num_done + index
        slot = lax.rem(turn, num_stages)
        lanes = (caches[0], ring.k, ring.k_full, ring.k_free), (caches[1], ring.v, ring.v_full, ring.v_free)
        for cache, tiles, full, free in lanes:
            pl.when(turn >= num_stages)(functools.partial(await_free, free.at[slot]))
            for part, block in enumerate(blocks):
                rows = tiles.at[slot, pl.ds(part * block_size, block_size)]
                plgpu.copy_gmem_to_smem(cache.at[block, :, kv_head], rows, full.at[slot])
        return next_blocks

    lax.fori_loop(0, keys.num_tiles, fetch, blocks_of(0))


def drain(ring: Ring, num_done: Any) -> None:
    """The producer, at its end: waits until every slot that it filled is free, so that no arrival is left unseen."""
    num_stages = ring.k.shape[0]

    def await_slot(turn: jax.Array, _: None) -> None:
        for free in (ring.k_free, ring.v_free):
            await_free(free.at[lax.rem(turn, num_stages)])

    lax.fori_loop(jnp.maximum(num_done - num_stages, 0), num_done, await_slot, None)


def attend_tiles(
    ops: TileOps,
    ring: Ring,
    q: Any,
    keys: Keys,
    visible: Callable[[jax.Array], jax.Array],
    consumer: jax.Array | int,
    num_done: Any = 0,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A consumer: softmax over the ring's tiles for one tile of queries.

    Args:
        q: [ROWS, H] in shared memory.
        visible: first key of a tile -> mask [ROWS, TILE_KEYS]; asked only for tiles that some row sees in part.
        consumer: index among the consumers, which all walk the same tiles.
        num_done: as for fetch_tiles.

    Returns:
        Highest score in units of log 2 [ROWS], sum of weights [ROWS], weighted sum of values [ROWS, H]; float32.
        Without tiles: -1e30, 0, 0. Rows that see no key mean nothing.
    """
    num_stages = ring.k.shape[0]

    def step(index: jax.Array, state: tuple[jax.Array, ...], *, partly_seen: bool) -> tuple[jax.Array, ...]:
        high, total, mixed = state
        slot = lax.rem(num_done + index, num_stages)
        first_key = (keys.first_tile + index) * TILE_KEYS
        await_full(ring.k_full.at[slot])
        scores = _log2_scores(ops.scores(q, ring.k.at[slot]), scale, soft_cap)
        plgpu.barrier_arrive(ring.k_free.at[slot])
        if partly_seen:
            scores = jnp.where(visible(first_key), scores, _MASKED)
        new_high = jnp.maximum(high, scores.max(axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_high, scores.shape, [0]))
        shrink = _rescale(high, new_high)
        mixed = mixed * lax.broadcast_in_dim(shrink, mixed.shape, [0])
        total = total * shrink + weights.sum(axis=1)
        await_full(ring.v_full.at[slot])
        if partly_seen:
            _clear_unseen_rows(ops, ring, ring.v.at[slot], keys, first_key, consumer)
        mixed = ops.add_product(mixed, weights.astype(ring.v.dtype), ring.v.at[slot])
        plgpu.barrier_arrive(ring.v_free.at[slot])
        return new_high, total, mixed

    state = ops.full_rows(_MASKED), ops.full_rows(0.0), ops.zeros(ring.v.shape[2])
    start = jnp.int32(0)
    if window is not None:  # without one, rows see every key from the first on
        start = jnp.clip(_div_up(keys.first_of_all, TILE_KEYS) - keys.first_tile, 0, keys.num_tiles)
        state = lax.fori_loop(0, start, lambda i, s: step(i, s, partly_seen=True), state)
    end = lax.div(keys.last_of_all + 1, TILE_KEYS) - keys.first_tile
    end = jnp.minimum(jnp.maximum(end, start), keys.num_tiles)
    state = lax.fori_loop(start, end, lambda i, s: step(i, s, partly_seen=False), state)
    return lax.fori_loop(end, keys.num_tiles, lambda i, s: step(i, s, partly_seen=True), state)


def normalized(mixed: jax.Array, total: jax.Array) -> jax.Array:
    """The mean; 0 for rows that have met no tile."""
    return mixed * lax.broadcast_in_dim(1 / jnp.maximum(total, SMALLEST_TOTAL), mixed.shape, [0])


def _rescale(high: jax.Array, new_high: jax.Array) -> jax.Array:
    """Factor on what was summed while `high` was the highest score."""
    return jnp.exp2(high - new_high)


def _log2_scores(products: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Scores times log2(e), so that softmax is a power of two."""
    if soft_cap is None:
        return products * (scale * _LOG2_E)
    # tanh(x) = 1 - 2 / (1 + e**2x): the hardware's own tanh has 11 bits, too few for a cap of 50.
    power = jnp.exp2(products * (2 * _LOG2_E * scale / soft_cap))
    return (soft_cap * _LOG2_E) - (2 * soft_cap * _LOG2_E) / (1 + power)


def _clear_unseen_rows(ops: TileOps, ring: Ring, tile: Any, keys: Keys, first_key: jax.Array, consumer: Any) -> None:
    """Zeroes rows of a V tile that no query sees: they may hold NaN, and 0 * NaN is NaN."""

    def clear() -> None:
        key = first_key + ops.iota(_CLEAR_COLUMNS, 0)
        seen = (key >= keys.first) & (key <= keys.last)
        for columns in parts_of(tile.shape[1], _CLEAR_COLUMNS):  # to save registers
            part = tile.at[:, columns]
            values = ops.load(part)
            ops.store(part, jnp.where(seen, values, jnp.zeros_like(values)))
        plgpu.commit_smem()

    pl.when(consumer == 0)(clear)
    plgpu.barrier_arrive(ring.cleared)
    plgpu.barrier_wait(ring.cleared)


def _div_up(value: jax.Array, divisor: int) -> jax.Array:
    return lax.div(value + (divisor - 1), divisor)
