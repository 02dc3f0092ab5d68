"""kv_write: put a step's keys and values into their cache slots."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.kv_write import reference, triton
from pallas_kernels.kv_write.checks import check_caches, check_floats, check_scales, check_slots

_WRITE: dict[str, Callable[..., tuple[jax.Array, jax.Array]]] = {
    "reference": reference.kv_write,
    "triton": triton.kv_write,
    "triton_interpret": functools.partial(triton.kv_write, interpret=True),
}


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    device: jax.Device | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write each token's key and value into its slot of the paged cache; in place where the caches are donated.

    The cache is that of PagedAttention (Kwon et al. 2023, arXiv:2309.06180): B blocks of P token slots.

    A quantised cache holds x / scale (in float32, as x * (1 / scale)), rounded to the nearest, ties to even, and
    saturated: to -128 .. 127 in int8, to -448 .. 448 in float8_e4m3fn (arXiv:2209.05433; subnormals are kept, NaN stays
    NaN). Scales are given, not computed.

    Args:
        k, v: [T, K, H] float32, bfloat16 or float16; cast to the cache's dtype.
        k_cache, v_cache: [B, P, K, H], one layer's caches: float32, bfloat16, float16, float8_e4m3fn or int8.
        slot_mapping: [T] int32, block * P + offset of each token, each in [0, B * P). Real tokens have distinct
            slots. Padding rows point into block 0, which nobody reads, and may share slots.
        k_scale, v_scale: float32 [K], one for each head, or [B, K], one for each block and head; positive. Only for a
            quantised cache; int8 must have them, for float8 None means 1.
        backend: "reference", "triton" (NVIDIA GPUs from 8.0 on), "triton_interpret" (the same kernel in Pallas'
            interpreter, anywhere, slow; for tests), or None for the device's best.
        device: what the program is compiled for; None is JAX's default device.

    Returns:
        (k_cache, v_cache) with the T slots replaced and every other slot as it was.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend is unknown.
        NotImplementedError: the named backend cannot run on the device, or cannot address a cache of this size.
    """
    if k.ndim != 3 or v.shape != k.shape:
        raise ValueError(f"k {k.shape} and v {v.shape}: must both be [T, K, H]")
    check_floats(k=k, v=v)
    check_caches(k_cache, v_cache, *k.shape[1:])
    check_slots(slot_mapping, k.shape[0], k_cache)
    check_scales(k_cache, k_scale, v_scale)
    refusals = {"triton": lambda: triton.refusal(k_cache)}
    write = choose_backend("kv_write", backend, _WRITE, device=device, refusals=refusals)
    k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale = jax.tree.map(
        jnp.asarray, (k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    )
    if not k.size:
        return k_cache, v_cache
    return write(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
