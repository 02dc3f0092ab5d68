"""kv_write in plain jax.numpy: the CPU path, and what the kernels are checked against."""

import jax


def kv_write(
    k: jax.Array, v: jax.Array, k_cache: jax.Array, v_cache: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See api.kv_write."""
    return _write(k, k_cache, slot_mapping), _write(v, v_cache, slot_mapping)


def _write(rows: jax.Array, cache: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    block_size = cache.shape[1]
    return cache.at[slot_mapping // block_size, slot_mapping % block_size].set(rows.astype(cache.dtype))
