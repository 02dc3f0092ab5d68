"""The KV cache's arrays: one K and one V array a layer, [num_blocks, block_size, num_kv_heads, head_dim]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig, ModelConfig, kv_groups

_STORED = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledCache:
    """An int8 cache array.

    Attributes:
      values: [B, P, K, H] int8.
      scale: [K] float32; a stored value stands for value * scale.
    """

    values: Any
    scale: Any


CacheArray = jax.Array | ScaledCache
Caches = tuple[tuple[CacheArray, CacheArray], ...]


def parts(cache: CacheArray) -> tuple[jax.Array, jax.Array | None]:
    """The [B, P, K, H] array of a cache, and its scale if it has one."""
    return (cache.values, cache.scale) if isinstance(cache, ScaledCache) else (cache, None)


def scaled(caches: Caches, scales: Sequence[tuple[jax.Array, jax.Array]]) -> Caches:
    """int8 caches with other scales, [K] float32 for the keys and the values of each layer."""
    def with_scale(cache: CacheArray, scale: jax.Array) -> ScaledCache:
        assert isinstance(cache, ScaledCache)
        return ScaledCache(cache.values, jax.device_put(scale, cache.scale.sharding))

    return tuple((with_scale(k_cache, k_scale), with_scale(v_cache, v_scale))
                 for (k_cache, v_cache), (k_scale, v_scale) in zip(caches, scales, strict=True))


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
    def has_scales(self) -> bool:
        """Whether the arrays are `ScaledCache`s. (fp8 has range enough to do without, as in vLLM.)"""
        return self.dtype == jnp.int8

    @property
    def num_bytes(self) -> int:
        """Of all layers, over all devices."""
        return self.num_blocks * block_bytes(self)


def cache_spec(model: ModelConfig, *, num_blocks: int, block_size: int, tensor_parallel_size: int,
               dtype: str) -> CacheSpec:
    num_kv_heads, _ = kv_groups(model, tensor_parallel_size)
    return CacheSpec(model.num_layers, num_blocks, block_size, num_kv_heads, model.head_dim, jnp.dtype(dtype))


def cache_dtype(config: EngineConfig) -> str:
    """What the cache's numbers are stored as, for resolved options."""
    return _STORED.get(config.kv_cache_dtype, config.dtype)


def block_bytes(spec: CacheSpec) -> int:
    """Bytes of one block in all layers, K and V, over all devices."""
    return 2 * spec.num_layers * spec.block_size * spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
