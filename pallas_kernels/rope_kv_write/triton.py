"""rope_kv_write through Pallas and Triton: one launch, in place.

A program takes one KV head of some tokens: it rotates that head's queries into q, its key into its slot, and copies its
value. Every lane of a head is computed from itself and its partner in the pair,

    y[i] = x[i] * cos + x[partner(i)] * (-sin or +sin),

so that a head is one load, one load of the partners (from the first-level cache) and one store, and the two pair
layouts differ in nothing but indices.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kv_write.triton import lane_mask, launch, load_lanes, program_size, program_tokens, store_rows


def rope_kv_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    epsilon: float = 1e-6,
    pair_layout: str = "half",
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.rope_kv_write; `interpret` runs the kernel in Pallas' interpreter."""
    num_tokens, num_kv_heads, num_rows, head_dim = qkv.shape
    group = num_rows - 2
    tile = pl.next_power_of_2(group) * pl.next_power_of_2(head_dim)
    tokens, num_warps = program_size(num_tokens, num_kv_heads, tile)
    q_shape = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, group, head_dim), qkv.dtype)
    q, k_cache, v_cache = launch(
        functools.partial(_kernel, tokens=tokens, epsilon=epsilon, pair_layout=pair_layout),
        "rope_kv_write",
        (pl.cdiv(num_tokens, tokens), num_kv_heads),
        ((k_cache, v_cache), qkv, (cos, sin), slot_mapping, (q_norm, k_norm), (k_scale, v_scale)),
        [q_shape, k_cache, v_cache],
        aliases={0: 1, 1: 2},
        num_warps=num_warps,
        interpret=interpret,
    )
    return q, k_cache, v_cache


def _kernel(
    old_caches: tuple[Any, Any],
    qkv: Any,
    tables: tuple[Any, Any],
    slots: Any,
    norms: tuple[Any | None, Any | None],
    scales: tuple[Any | None, Any | None],
    new_q: Any,
    new_k: Any,
    new_v: Any,
    *,
    tokens: int,
    epsilon: float,
    pair_layout: str,
) -> None:
    num_tokens, _, num_rows, head_dim = qkv.shape
    group = num_rows - 2
    # Tiles have the axes tokens, query heads, lanes.
    token = program_tokens(tokens, num_tokens)[:, None, None]
    head = pl.program_id(1)
    query = jnp.minimum(jnp.arange(pl.next_power_of_2(group)), group - 1)[None, :, None]  # repeated, as tokens are
    lane = jnp.arange(pl.next_power_of_2(head_dim))[None, None]
    in_head = lane_mask(lane, head_dim)
    pairs = _load_pairs(tables, token, lane, pair_layout)

    def turned(row: jax.Array | int, weight: Any | None) -> jax.Array:
        x = load_lanes(qkv.at[token, head, row, lane], in_head)
        partner = load_lanes(qkv.at[token, head, row, pairs.lane], pairs.mask)
        if weight is not None:
            scale = _rms_scale(x, head_dim, epsilon)
            x = _scaled(x, scale, load_lanes(weight.at[lane], in_head))
            partner = _scaled(partner, scale, load_lanes(weight.at[pairs.lane], pairs.mask))
        y = (x.astype(jnp.float32) * pairs.cos + partner.astype(jnp.float32) * pairs.sin).astype(x.dtype)
        return y if pairs.mask is None else jnp.where(pairs.mask, y, x)

    slot = plt.load(slots.at[token])
    value = load_lanes(qkv.at[token, head, group + 1, lane], in_head)
    q_norm, k_norm = norms
    k_scale, v_scale = scales
    store_rows(new_v, value, slot, head, lane, v_scale)
    store_rows(new_k, turned(group, k_norm), slot, head, lane, k_scale)
    plt.store(new_q.at[token, head, query, lane], turned(query, q_norm), mask=in_head)


def _rms_scale(x: jax.Array, head_dim: int, epsilon: float) -> jax.Array:
    """[..., 1] float32; lanes past the head hold 0."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) * (1 / head_dim) + epsilon)


def _scaled(x: jax.Array, scale: jax.Array, weight: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale * weight.astype(jnp.float32)).astype(x.dtype)


class _Pairs(NamedTuple):
    """What rotation needs, lane by lane.

    Attributes:
        lane: [1, 1, lanes], the partner of each.
        mask: [1, 1, lanes], which lanes turn; None for all.
        cos, sin: float32 [tokens, 1, lanes]; sin with the sign that the partner comes in with.
    """

    lane: jax.Array
    mask: jax.Array | None
    cos: jax.Array
    sin: jax.Array


def _load_pairs(tables: tuple[Any, Any], token: jax.Array, lane: jax.Array, pair_layout: str) -> _Pairs:
    num_pairs = tables[0].shape[1]
    if pair_layout == "half":
        is_first = lane < num_pairs
        partner = jnp.where(is_first, lane + num_pairs, lane - num_pairs)
        pair = jnp.where(is_first, lane, lane - num_pairs)
    else:
        is_first, partner, pair = lane % 2 == 0, lane ^ 1, lane >> 1
    mask = lane_mask(lane, 2 * num_pairs)
    cosine, sine = (load_lanes(table.at[token, pair], mask) for table in tables)
    return _Pairs(partner, mask, cosine, jnp.where(is_first, -sine, sine))
