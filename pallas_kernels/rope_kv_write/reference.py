"""rope_kv_write in plain jax.numpy: the CPU path, and what the kernel is checked against."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_write.reference import kv_write


def rope_kv_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    epsilon: float,
    pair_layout: str,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.rope_kv_write."""
    q, k, v = split_and_rotate(
        qkv, cos, sin, q_norm=q_norm, k_norm=k_norm, epsilon=epsilon, pair_layout=pair_layout
    )
    k_cache, v_cache = kv_write(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return q, k_cache, v_cache


def split_and_rotate(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    epsilon: float = 1e-6,
    pair_layout: str = "half",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part before the cache, differentiable: q [T, K, G, H] and k [T, K, H] normed and rotated, v [T, K, H]."""
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, epsilon), rms_norm(k, k_norm, epsilon)
    return rotate(q, cos, sin, pair_layout), rotate(k, cos, sin, pair_layout), v


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """x [..., H] / sqrt(mean(x^2) + epsilon) * weight [H], in float32; the result has x's dtype."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, pair_layout: str = "half") -> jax.Array:
    """Turns the pairs among the first R lanes of x [T, ..., H] by the angles of cos and sin [T, R/2], in float32."""
    num_pairs = cos.shape[1]
    shape = (cos.shape[0], *(1,) * (x.ndim - 2), num_pairs)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    rotated, rest = x[..., : 2 * num_pairs].astype(jnp.float32), x[..., 2 * num_pairs :]
    if pair_layout == "half":
        first, second = jnp.split(rotated, 2, axis=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    if pair_layout == "half":
        rotated = jnp.concatenate(turned, axis=-1)
    else:
        rotated = jnp.stack(turned, axis=-1).reshape(rotated.shape)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
