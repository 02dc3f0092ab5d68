"""kv_write in plain jax.numpy: the CPU path, and what the kernels are checked against."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.checks import QUANTISED


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See api.kv_write."""
    if len(slot_mapping) == 1:
        # XLA turns a scatter of one row into a dynamic-update-slice, and XLA:CPU then makes one for each reader of the
        # cache, on copies of the whole of it (60 to 85 ms a layer for caches of 25 MB). Written twice, it stays a
        # scatter, in place.
        k, v, slot_mapping = (jnp.repeat(rows, 2, axis=0) for rows in (k, v, slot_mapping))
    return _write(k, k_cache, slot_mapping, k_scale), _write(v, v_cache, slot_mapping, v_scale)


def _write(rows: jax.Array, cache: jax.Array, slot_mapping: jax.Array, scale: jax.Array | None) -> jax.Array:
    block_size = cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if scale is not None and scale.ndim == 2:
        scale = scale[block]
    return cache.at[block, offset].set(_convert(rows, scale, cache.dtype), mode="promise_in_bounds")


def _convert(rows: jax.Array, scale: jax.Array | None, dtype: Any) -> jax.Array:
    """Rows [T, K, H], scale [K] or [T, K] -> what a cache of this dtype stores."""
    if dtype not in QUANTISED:
        return rows.astype(dtype)
    scaled = rows.astype(jnp.float32)
    if scale is not None:
        scaled = scaled * (1 / scale[..., None])
    limits = jnp.iinfo(dtype) if dtype == jnp.int8 else jnp.finfo(dtype)
    if dtype == jnp.int8:
        scaled = jnp.round(scaled)
    return jnp.clip(scaled, float(limits.min), float(limits.max)).astype(dtype)
