"""What the numbers of a quantised cache mean: stored value times scale."""

import jax
import jax.numpy as jnp
from jax import lax


def dequantize(cache: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The float32 cache that a quantised one stands for.

    Args:
        cache: [B, P, K, H] int8 or float8_e4m3fn.
        scale: float32 [K], [B, K], or None for 1.
    """
    values = cache.astype(jnp.float32)
    if scale is None:
        return values
    return values * (scale[:, None, :, None] if scale.ndim == 2 else scale[:, None])


def e4m3_to_float32(stored: jax.Array) -> jax.Array:
    """float8_e4m3fn to float32 by integer arithmetic, for devices that have no instruction for it (before 8.9).

    Sign, exponent and mantissa are put where float16 has its own. Its bias is 15 instead of 7, hence the factor 2 ** 8,
    and its subnormal numbers lie as many bits below, so that those come out right too. (arXiv:2209.05433)
    """
    bits = lax.bitcast_convert_type(stored, jnp.uint8).astype(jnp.int16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)
