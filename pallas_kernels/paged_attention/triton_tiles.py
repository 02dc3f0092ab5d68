"""What the Triton attention kernels share: tiles of a paged cache in registers, and the online softmax over them.

Triton's arrays have powers of two as sizes: a head of 80 or 96 lanes lies in arrays of W = 128, whose last lanes are
masked. They cost products and registers, but no memory traffic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.quantization import e4m3_to_float32

SMALLEST_DOT = 16  # rows, columns and depth of the tensor cores' smallest product
_LOG2_E = 1.4426950408889634
_MASKED = -1e30  # finite: a tile that is masked as a whole must not make NaN; a later real score scales it away
_SMALLEST_TOTAL = 1e-30


def padded(head_dim: int) -> int:
    """W, lanes of the arrays that hold a head."""
    return max(1 << (head_dim - 1).bit_length(), SMALLEST_DOT)


def load_heads(ref: Any, *index: Any) -> jax.Array:
    """[rows, W] of ref [..., H], 0 past H; index, arrays [rows, 1] or scalars, says which heads."""
    lane, inside = _lanes(ref)
    if inside is None:
        return plt.load(ref.at[*index, lane])
    rows = jnp.broadcast_shapes(*(jnp.shape(i) for i in index))[0]
    zeros = jnp.zeros((rows, lane.size), ref.dtype)  # a plain 0 would be an integer, without a way to float8
    return plt.load(ref.at[*index, lane], mask=jnp.broadcast_to(inside, zeros.shape), other=zeros)


def store_heads(ref: Any, *index: Any, values: jax.Array, mask: jax.Array) -> None:
    """Puts values [rows, W] where `load_heads` takes them from, those of rows in mask [rows, 1]."""
    lane, inside = _lanes(ref)
    mask = mask if inside is None else mask & inside
    plt.store(ref.at[*index, lane], values.astype(ref.dtype), mask=jnp.broadcast_to(mask, values.shape))


def _lanes(ref: Any) -> tuple[jax.Array, jax.Array | None]:
    head_dim = ref.shape[-1]
    lane = jnp.arange(padded(head_dim), dtype=jnp.int32)[None]
    return lane, None if lane.size == head_dim else lane < head_dim


def cdiv(count: Any, size: Any) -> Any:
    """count / size, rounded up; for Python ints and traced int32. A count below 0 gives at most 0."""
    return (count + size - 1) // size if isinstance(count, int) else lax.div(count + (size - 1), size)


class Cache(NamedTuple):
    """One layer's cache: arrays outside a kernel, refs inside.

    Attributes:
        k, v: [B, P, K, H].
        k_scale, v_scale: float32 [K], [B, K] or None: what the stored values are to be multiplied by.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for, besides shapes and sizes.

    Attributes:
        scale, window, soft_cap: see api.py.
        native_fp8: the device has instructions that convert float8_e4m3fn.
    """

    scale: float
    window: int | None
    soft_cap: float | None
    native_fp8: bool


@dataclass(frozen=True)
class KeyTiles:
    """Reads one KV head of one sequence, `keys` tokens at a time, from position `start` on.

    A position past `last` is read as `last`: always a real token (an unused slot may hold NaN, and 0 * NaN is NaN),
    whose cache line is at hand. So no load needs a mask.
    """

    cache: Cache
    tables_ref: Any  # [S, M] int32
    seq: jax.Array
    head: jax.Array
    start: jax.Array
    last: jax.Array
    keys: int
    dtype: Any  # of the products

    def positions(self, index: jax.Array) -> jax.Array:
        return self.start + index * self.keys + jnp.arange(self.keys, dtype=jnp.int32)

    def pages(self, index: jax.Array) -> jax.Array:
        position = jnp.minimum(self.positions(index), self.last)
        return plt.load(self.tables_ref.at[self.seq, lax.div(position, jnp.int32(self.cache.k.shape[1]))])

    def load(self, ref: Any, index: jax.Array, pages: jax.Array, native_fp8: bool) -> jax.Array:
        """[keys, W] of `cache.k` or `cache.v`, unscaled."""
        slot = lax.rem(jnp.minimum(self.positions(index), self.last), ref.shape[1])
        stored = load_heads(ref, pages[:, None], slot[:, None], self.head)
        if stored.dtype == jnp.float8_e4m3fn and not native_fp8:
            stored = e4m3_to_float32(stored)
        return stored.astype(self.dtype)

    def scales(self, ref: Any) -> Callable[[jax.Array], jax.Array | float]:
        """pages [keys] -> what their values are to be multiplied by: a scalar or [1, keys]."""
        if ref is None:
            return lambda pages: 1.0
        if len(ref.shape) == 1:
            scale = plt.load(ref.at[self.head])
            return lambda pages: scale
        return lambda pages: plt.load(ref.at[pages, self.head])[None]


class Softmax(NamedTuple):
    """Running softmax-weighted sum of values for M query rows (arXiv:1805.02867, arXiv:2205.14135).

    Attributes:
        high: [M] highest score so far, in powers of two.
        total: [M] sum of the weights 2 ** (score - high).
        mixed: [M, W] weighted sum of values.
    """

    high: jax.Array
    total: jax.Array
    mixed: jax.Array

    @staticmethod
    def empty(num_rows: int, head_dim: int) -> "Softmax":
        zeros = jnp.zeros((num_rows,), jnp.float32)
        return Softmax(jnp.full_like(zeros, _MASKED), zeros, jnp.zeros((num_rows, padded(head_dim)), jnp.float32))

    def result(self) -> jax.Array:
        """[M, W]; 0 for a row that saw no key."""
        return self.mixed / jnp.maximum(self.total, _SMALLEST_TOTAL)[:, None]

    def log2_total(self) -> jax.Array:
        """[M]: what a result weighs, as a power of two, against that of other keys."""
        return self.high + jnp.log2(jnp.maximum(self.total, _SMALLEST_TOTAL))


def attend(
    softmax: Softmax,
    query: jax.Array,
    tiles: KeyTiles,
    begin: jax.Array,
    end: jax.Array,
    variant: Variant,
    visible: Callable[[jax.Array], jax.Array] | None,
) -> Softmax:
    """Takes in the key tiles begin .. end-1.

    Args:
        query: [M, W] of tiles.dtype.
        visible: positions [keys] -> bool that broadcasts to [M, keys]; None: every key is.
    """
    k_scales, v_scales = tiles.scales(tiles.cache.k_scale), tiles.scales(tiles.cache.v_scale)

    def step(index: jax.Array, carry: tuple[Softmax, jax.Array]) -> tuple[Softmax, jax.Array]:
        softmax, pages = carry
        keys = tiles.load(tiles.cache.k, index, pages, variant.native_fp8)
        values = tiles.load(tiles.cache.v, index, pages, variant.native_fp8)
        # Page ids are carried one step ahead: the loads of keys then hang on no other load of their step, and the
        # compiler keeps several steps' tiles in flight.
        next_pages = tiles.pages(index + 1)
        scores = _scores(query, keys, k_scales(pages), variant)
        if visible is not None:
            scores = jnp.where(visible(tiles.positions(index)), scores, _MASKED)
        return _take_in(softmax, scores, values, v_scales(pages)), next_pages

    softmax, _ = lax.fori_loop(begin, end, step, (softmax, tiles.pages(begin)))
    return softmax


def _scores(query: jax.Array, keys: jax.Array, k_scale: jax.Array | float, variant: Variant) -> jax.Array:
    """float32 [M, keys], as powers of two."""
    products = plt.dot(query, keys, trans_b=True)
    if variant.soft_cap is None:
        return products * (k_scale * (variant.scale * _LOG2_E))
    capped = jnp.tanh(products * (k_scale * (variant.scale / variant.soft_cap)))
    return capped * (variant.soft_cap * _LOG2_E)


def _take_in(softmax: Softmax, scores: jax.Array, values: jax.Array, v_scale: jax.Array | float) -> Softmax:
    high = jnp.maximum(softmax.high, scores.max(axis=1))
    shrink = _rescale(softmax.high, high)
    weights = jnp.exp2(scores - high[:, None])
    total = softmax.total * shrink + weights.sum(axis=1)
    if not isinstance(v_scale, float):
        weights = weights * v_scale
    mixed = softmax.mixed * shrink[:, None] + plt.dot(weights.astype(values.dtype), values)
    return Softmax(high, total, mixed)


def _rescale(old_high: jax.Array, new_high: jax.Array) -> jax.Array:
    """What sums relative to the old highest score shrink by."""
    return jnp.exp2(old_high - new_high)
