"""The KV cache's arrays: one K and one V array a layer, [num_blocks, block_size, num_kv_heads, head_dim]."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig, kv_groups

Caches = tuple[tuple[jax.Array, jax.Array], ...]


@dataclass(frozen=True)
class CacheSpec:
    """Shape of the whole cache.

    Attributes:
      num_kv_heads: as stored, over all devices.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def num_bytes(self) -> int:
        """Of all layers, over all devices."""
        return self.num_blocks * block_bytes(self)


def cache_spec(model: ModelConfig, *, num_blocks: int, block_size: int, tensor_parallel_size: int,
               dtype: str) -> CacheSpec:
    num_kv_heads, _ = kv_groups(model, tensor_parallel_size)
    return CacheSpec(model.num_layers, num_blocks, block_size, num_kv_heads, model.head_dim, jnp.dtype(dtype))


def block_bytes(spec: CacheSpec) -> int:
    """Bytes of one block in all layers, K and V, over all devices."""
    return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
