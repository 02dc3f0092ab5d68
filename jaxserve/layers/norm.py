"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (arXiv:1910.07467), in float32 whatever x is."""

    def __init__(self, width: int, *, epsilon: float, axis: str | None = None, dtype: jnp.dtype):
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones((width,), dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width], same dtype."""
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale * self.weight.get_value().astype(jnp.float32)).astype(x.dtype)
