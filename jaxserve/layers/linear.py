"""Linear projections between multi-axis feature spaces, and the one place that chooses how their dots are written."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Axes = tuple[str | None, ...]

_init_weight = nnx.initializers.normal(stddev=0.02)


def project(x: jax.Array, weight: jax.Array, num_in_axes: int = 1, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """Contracts the last axes of `x` with the last axes of `weight`.

    Args:
      x: [T, in...].
      weight: [out..., in...], the order in which PyTorch stores it.
      num_in_axes: how many axes `in...` has.
      out_dtype: accumulate and return in this dtype; by default that of `x`.

    Returns:
      [T, out...].
    """
    # Two axes a side: a dot over more is first made canonical by XLA, which transposes and copies the weight each step.
    # These reshapes move nothing.
    out_shape, in_size = weight.shape[:weight.ndim - num_in_axes], math.prod(weight.shape[weight.ndim - num_in_axes:])
    y = lax.dot_general(x.reshape(-1, in_size), weight.reshape(-1, in_size), (((1,), (1,)), ((), ())),
                        preferred_element_type=out_dtype)
    return y.reshape(-1, *out_shape)


class Linear(nnx.Module):
    """y[out...] = sum over in... of weight[out..., in...] x[in...], plus bias[out...].

    Args:
      in_shape, out_shape: the feature axes on either side.
      axes: logical names of the weight's axes, outputs first; the bias takes those of the outputs.
    """

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, axes: Axes, use_bias: bool = False,
                 dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_in_axes = len(in_shape)
        self.weight = nnx.Param(_init_weight(rngs.params(), (*out_shape, *in_shape), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype), axes=axes[:len(out_shape)]) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """[T, in...] -> [T, out...]."""
        y = project(x, self.weight.get_value(), self.num_in_axes, out_dtype=out_dtype)
        return y if self.bias is None else y + self.bias.get_value()
