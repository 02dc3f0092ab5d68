"""Linear projections between multi-axis feature spaces, and the one place that chooses how their dots are written."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Axes = tuple[str | None, ...]

_init_weight = nnx.initializers.normal(stddev=0.02)

_FEATURE_MAJOR_ROWS = range(2, 65)
"""Numbers of rows at which XLA:CPU is faster at weight . x^T than at x . weight^T, float32: over a whole decoder of
SmolLM2-135M's shape by a quarter to a third at 8 rows, by a tenth to a fifth at 16 and 32, by a twentieth at 64. At 128
it is slower."""

_ONE_ROW_SLICES = 8
"""XLA:CPU runs a matrix times one vector on one core, but a batch of them on several: the weight's outputs are cut into
this many slices (1.5 times as fast on two cores, a whole decoder of SmolLM2-135M's shape)."""


def project(x: jax.Array, weight: jax.Array, num_in_axes: int = 1, *, keep_axes: bool = False,
            bias: jax.Array | None = None, out_dtype: Any = None) -> jax.Array:
    """Contracts the last axes of `x` with the last axes of `weight`, and adds the bias.

    Args:
      x: [T, in...].
      weight: [out..., in...], the order in which PyTorch stores it.
      num_in_axes: how many axes `in...` has.
      keep_axes: leave the weight's axes as they are. By default each side's become one, which moves nothing and saves
        a transposed copy of the weight (XLA:CPU makes one to bring a dot of more axes into its canonical form). But it
        needs a sharded axis to come first on its side: else the partitioner gathers the weight.
      bias: [out...], or None.
      out_dtype: accumulate and return in this dtype; by default that of `x`.

    Returns:
      [T, out...].
    """
    num_out_axes = weight.ndim - num_in_axes
    if keep_axes:
        axes_x, axes_weight = tuple(range(1, x.ndim)), tuple(range(num_out_axes, weight.ndim))
        y = lax.dot_general(x, weight, ((axes_x, axes_weight), ((), ())), preferred_element_type=out_dtype)
        return y if bias is None else y + bias
    out_shape, in_size = weight.shape[:num_out_axes], math.prod(weight.shape[num_out_axes:])
    y = _dot(x.reshape(-1, in_size), weight.reshape(-1, in_size), out_dtype)
    if bias is not None:  # before the reshape: cuBLASLt can add a vector to the rows itself
        y = y + bias.reshape(-1)
    return y.reshape(-1, *out_shape)


def _dot(x: jax.Array, weight: jax.Array, out_dtype: Any) -> jax.Array:
    """[T, in], [out, in] -> [T, out]."""
    plain = partial(_dot_plain, out_dtype=out_dtype)
    if x.shape[0] == 1 and weight.shape[0] % _ONE_ROW_SLICES == 0:
        on_cpu = _dot_one_row
    elif x.shape[0] in _FEATURE_MAJOR_ROWS:
        on_cpu = _dot_feature_major
    else:
        return plain(x, weight)
    return lax.platform_dependent(x, weight, cpu=partial(on_cpu, out_dtype=out_dtype), default=plain)


def _dot_plain(x: jax.Array, weight: jax.Array, *, out_dtype: Any) -> jax.Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _dot_feature_major(x: jax.Array, weight: jax.Array, *, out_dtype: Any) -> jax.Array:
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return lax.optimization_barrier(y).T  # without the barrier XLA swaps the operands back


def _dot_one_row(x: jax.Array, weight: jax.Array, *, out_dtype: Any) -> jax.Array:
    num_out, num_in = weight.shape
    slices = weight.reshape(_ONE_ROW_SLICES, num_out // _ONE_ROW_SLICES, num_in)
    vectors = jnp.broadcast_to(x, (_ONE_ROW_SLICES, num_in))
    y = lax.dot_general(slices, vectors, (((2,), (1,)), ((0,), (0,))), preferred_element_type=out_dtype)
    return y.reshape(1, num_out)


class Linear(nnx.Module):
    """y[out...] = sum over in... of weight[out..., in...] x[in...], plus bias[out...].

    Args:
      in_shape, out_shape: the feature axes on either side.
      axes: logical names of the weight's axes, outputs first; the bias takes those of the outputs.
      keep_axes: see `project`.
    """

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, axes: Axes, use_bias: bool = False,
                 keep_axes: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.num_in_axes, self.keep_axes = len(in_shape), keep_axes
        self.weight = nnx.Param(_init_weight(rngs.params(), (*out_shape, *in_shape), dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype), axes=axes[:len(out_shape)]) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[T, in...] -> [T, out...]."""
        bias = None if self.bias is None else self.bias.get_value()
        return project(x, self.weight.get_value(), self.num_in_axes, keep_axes=self.keep_axes, bias=bias,
                       out_dtype=out_dtype)
