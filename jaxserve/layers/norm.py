"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.rope_kv_write import rms_norm


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (arXiv:1910.07467), in float32 whatever x is."""

    def __init__(self, width: int, *, epsilon: float, axis: str | None = None, dtype: jnp.dtype):
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones((width,), dtype), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width], same dtype."""
        return rms_norm(x, self.weight.get_value(), self.epsilon)
