"""Linear projections with 4-bit weights."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import QuantizationConfig
from jaxserve.layers.linear import Axes, Linear
from pallas_kernels.int4_matmul.api import int4_matmul
from pallas_kernels.int4_matmul.layout import BLOCK, WORDS, Int4Weight


class Int4Linear(nnx.Module):
    """`Linear` with weights of 4 bits, in the packed layout of pallas_kernels/int4_matmul/layout.py, whose axis of
    outputs is kept apart as out_shape.

    Args:
      in_shape, out_shape, axes, use_bias: as for `Linear`.
    """

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, axes: Axes, use_bias: bool = False,
                 quantization: QuantizationConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        num_in, out_axes = math.prod(in_shape), axes[:len(out_shape)]
        num_blocks = -(-num_in // BLOCK)
        num_groups = num_blocks * BLOCK // quantization.group_size if quantization.group_size else 1
        packed = jax.random.bits(rngs.params(), (num_blocks, *out_shape, WORDS), jnp.uint32).view(jnp.int32)
        self.in_shape, self.out_shape = in_shape, out_shape
        self.packed = nnx.Param(packed, axes=(None, *out_axes, None))
        # 0.02 deviation of weights, as in `Linear`: nibbles deviate by 4.6.
        self.scales = nnx.Param(jnp.full((num_groups, *out_shape), 0.02 / 4.6, dtype), axes=(None, *out_axes))
        self.zeros = None if quantization.symmetric else nnx.Param(
            jnp.full((num_groups, *out_shape), 8, jnp.int8), axes=(None, *out_axes))
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype), axes=out_axes) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[T, in...] -> [T, out...]."""
        num_out = math.prod(self.out_shape)
        scales = self.scales.get_value().reshape(-1, num_out)
        zeros = None if self.zeros is None else self.zeros.get_value().reshape(-1, num_out)
        bias = None if self.bias is None else self.bias.get_value().reshape(num_out)
        weight = Int4Weight(self.packed.get_value().reshape(-1, num_out, WORDS), scales, zeros)
        y = int4_matmul(x.reshape(x.shape[0], -1), weight, bias)
        return y.reshape(-1, *self.out_shape).astype(out_dtype or x.dtype)


def make_linear(in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, quantization: QuantizationConfig | None,
                axes: Axes, use_bias: bool, keep_axes: bool = False, dtype: jnp.dtype,
                rngs: nnx.Rngs) -> Linear | Int4Linear:
    """The projection that the model's quantisation asks for."""
    if quantization is None:
        return Linear(in_shape, out_shape, axes=axes, use_bias=use_bias, keep_axes=keep_axes, dtype=dtype, rngs=rngs)
    return Int4Linear(in_shape, out_shape, axes=axes, use_bias=use_bias, quantization=quantization, dtype=dtype,
                      rngs=rngs)
