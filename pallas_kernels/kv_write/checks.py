"""What the operations that write the cache demand of it."""

import jax
import jax.numpy as jnp

FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
QUANTISED = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))


def check_floats(**arrays: jax.Array | None) -> None:
    for name, array in arrays.items():
        if array is not None and array.dtype not in FLOATS:
            raise ValueError(f"{name} {array.dtype}: must be float32, bfloat16 or float16")


def check_caches(k_cache: jax.Array, v_cache: jax.Array, num_kv_heads: int, head_dim: int) -> None:
    if k_cache.ndim != 4 or k_cache.shape[2:] != (num_kv_heads, head_dim):
        raise ValueError(f"k_cache {k_cache.shape}: must be [B, P, {num_kv_heads}, {head_dim}]")
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"v_cache {v_cache.shape} {v_cache.dtype}: must be {k_cache.shape} {k_cache.dtype}")
    if k_cache.dtype not in (*FLOATS, *QUANTISED):
        raise ValueError(f"k_cache {k_cache.dtype}: must be float32, bfloat16, float16, float8_e4m3fn or int8")


def check_slots(slot_mapping: jax.Array, num_tokens: int, k_cache: jax.Array) -> None:
    if num_tokens and not k_cache.shape[0] * k_cache.shape[1]:
        raise ValueError(f"k_cache {k_cache.shape}: has no slots, but there are {num_tokens} tokens to write")
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != jnp.int32:
        raise ValueError(f"slot_mapping {slot_mapping.shape} {slot_mapping.dtype}: must be [{num_tokens}] int32")


def check_scales(k_cache: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None) -> None:
    """Scales are for quantised caches only; an int8 cache is nothing without them."""
    num_blocks, _, num_kv_heads, _ = k_cache.shape
    allowed = ((num_kv_heads,), (num_blocks, num_kv_heads))
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            if k_cache.dtype == jnp.int8:
                raise ValueError(f"{name}=None: an int8 cache needs scales, [{num_kv_heads}] or {list(allowed[1])}")
        elif k_cache.dtype not in QUANTISED:
            raise ValueError(f"{name}: must be None, for the cache is {k_cache.dtype} and not quantised")
        elif scale.shape not in allowed or scale.dtype != jnp.float32:
            raise ValueError(
                f"{name} {scale.shape} {scale.dtype}: must be [{num_kv_heads}] or {list(allowed[1])} float32"
            )
    if k_scale is not None and v_scale is not None and k_scale.shape != v_scale.shape:
        raise ValueError(f"v_scale {v_scale.shape}: must be {k_scale.shape}, as k_scale")
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale: both or neither must be None")
