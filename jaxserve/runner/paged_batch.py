"""The attention batch of a serving step: rows of many sequences over paged caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.layers.attention import HeadTransform
from jaxserve.runner.kv_cache import CacheArray, ScaledCache, parts
from jaxserve.runner.sharding import TENSOR
from pallas_kernels.paged_attention import paged_attention_decode, paged_attention_ragged
from pallas_kernels.rope_kv_write import rope_kv_write

Fields = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=("fields", "slot_mapping"), meta_fields=("mesh",))
@dataclass(frozen=True)
class PagedBatch:
    """What the layers need to know of a step.

    Attributes:
      fields: the step's integer fields, see `BatchLayout`.
      slot_mapping: [T] int32, where each row's key and value go: block * P + slot in block; padding rows: block 0.
      mesh: with more than one device on it, attention runs in shard_map, each device with its own heads.
    """

    fields: Fields
    slot_mapping: jax.Array
    mesh: Mesh = field(compare=True)

    def attend(self, qkv: jax.Array, heads: HeadTransform, k_cache: CacheArray, v_cache: CacheArray, *,
               scale: float, window: int | None) -> tuple[jax.Array, CacheArray, CacheArray]:
        """Writes keys and values into the caches [B, P, K, H], lets the queries attend; see `AttentionBatch.attend`."""
        attend = partial(_attend, scale=scale, window=window)
        if self.mesh.size > 1:
            by_head, whole = PartitionSpec(None, TENSOR), PartitionSpec()
            cache: Any = PartitionSpec(None, None, TENSOR)
            if isinstance(k_cache, ScaledCache):
                cache = ScaledCache(cache, PartitionSpec(TENSOR))
            attend = jax.shard_map(attend, mesh=self.mesh, in_specs=(by_head, whole, cache, cache, whole, whole),
                                   out_specs=(by_head, cache, cache), check_vma=False)
        return attend(qkv, heads, k_cache, v_cache, self.slot_mapping, self.fields)


def _attend(qkv: jax.Array, heads: HeadTransform, k_cache: CacheArray, v_cache: CacheArray, slot_mapping: jax.Array,
            fields: Fields, **options: Any) -> tuple[jax.Array, CacheArray, CacheArray]:
    (k_values, k_scale), (v_values, v_scale) = parts(k_cache), parts(v_cache)
    q, k_values, v_values = rope_kv_write(
        qkv, heads.cos, heads.sin, k_values, v_values, slot_mapping, q_norm=heads.q_norm, k_norm=heads.k_norm,
        epsilon=heads.epsilon, k_scale=k_scale, v_scale=v_scale)
    options |= dict(k_scale=k_scale, v_scale=v_scale)
    tables = fields["block_tables"], fields["context_lens"]
    if "tile_seq" in fields:
        names = ("query_starts", "query_lens", "num_decodes", "tile_seq", "tile_row", "num_tiles")
        rows = [fields[name] for name in names]
        out = paged_attention_ragged(q, k_values, v_values, *tables, *rows, **options)
    else:
        out = paged_attention_decode(q, k_values, v_values, *tables, **options)
    if k_scale is None:
        return out, k_values, v_values
    return out, ScaledCache(k_values, k_scale), ScaledCache(v_values, v_scale)


def row_positions(fields: Fields, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Position of each row's token in its sequence, and its slot in the cache (`slot_mapping`): [T] int32 each."""
    context_lens = fields["context_lens"]
    if "row_seq" in fields:
        num_seqs = context_lens.shape[0]
        is_live = fields["row_seq"] < num_seqs
        seq = jnp.minimum(fields["row_seq"], num_seqs - 1)
        rows = jnp.arange(seq.shape[0], dtype=jnp.int32)
        last_row = fields["query_starts"][seq] + fields["query_lens"][seq] - 1
        positions = context_lens[seq] - 1 - last_row + rows
    else:
        is_live = context_lens > 0
        seq = jnp.arange(context_lens.shape[0], dtype=jnp.int32)
        positions = context_lens - 1
    positions = jnp.where(is_live, positions, 0)
    block_ids = fields["block_tables"][seq, positions // block_size]
    slots = jnp.where(is_live, block_ids * block_size + positions % block_size, 0)
    return positions, slots
