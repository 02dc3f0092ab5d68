"""kv_write: put a step's keys and values into their cache slots."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.kv_write import reference

_WRITE = {"reference": reference.kv_write}


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write each token's key and value into its slot of the paged cache; in place where the caches are donated.

    The cache is that of PagedAttention (Kwon et al. 2023, arXiv:2309.06180): B blocks of P token slots.

    Args:
        k, v: [T, K, H], any float dtype; cast to the cache's.
        k_cache, v_cache: [B, P, K, H], one layer's caches.
        slot_mapping: [T] int32, block * P + offset of each token, each in [0, B * P). Real tokens have distinct
            slots. Padding rows point into block 0, which nobody reads, and may share slots.
        backend: "reference", or None for the platform's best.

    Returns:
        (k_cache, v_cache) with the T slots replaced and every other slot as it was.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend is unknown.
    """
    if k.ndim != 3 or v.shape != k.shape:
        raise ValueError(f"k {k.shape} and v {v.shape}: must both be [T, K, H]")
    if k_cache.ndim != 4 or k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(f"k_cache {k_cache.shape}: must be [B, P, {k.shape[1]}, {k.shape[2]}]")
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache {v_cache.shape} {v_cache.dtype}: must be {k_cache.shape} {k_cache.dtype}")
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping {slot_mapping.shape} {slot_mapping.dtype}: must be [{k.shape[0]}] int32")
    return choose_backend("kv_write", backend, _WRITE)(k, v, k_cache, v_cache, slot_mapping)
