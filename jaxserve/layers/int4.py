"""Linear projections with 4-bit weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.errors import InvalidInputError
from jaxserve.layers.linear import Axes
from jaxserve.layers.ranks import product_on_ranks
from pallas_kernels.int4_matmul.api import int4_matmul
from pallas_kernels.int4_matmul.layout import BLOCK, WORDS, Int4Weight


class Int4Linear(nnx.Module):
    """`Linear` with weights of 4 bits, in the packed layout of pallas_kernels/int4_matmul/layout.py, whose axis of
    outputs is kept apart as out_shape.

    Input features are split over ranks between packed blocks: those of `packed`, and the groups of `scales` and
    `zeros`, carry the name of the first input axis. One group of all features is every rank's.

    Args:
      in_shape, out_shape, axes, use_bias: as for `Linear`.
    """

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, axes: Axes, use_bias: bool = False,
                 quantization: QuantizationConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        num_blocks = -(-math.prod(in_shape) // BLOCK)
        num_groups = num_blocks * BLOCK // quantization.group_size if quantization.group_size else 1
        packed = jax.random.bits(rngs.params(), (num_blocks, *out_shape, WORDS), jnp.uint32).view(jnp.int32)
        self.in_axes, self.out_axes = axes[len(out_shape):], axes[:len(out_shape)]
        self.packed = nnx.Param(packed, axes=(self.in_axes[0], *self.out_axes, None))
        group_axes = (self.in_axes[0] if quantization.group_size else None, *self.out_axes)
        # 0.02 deviation of weights, as in `Linear`: nibbles deviate by 4.6.
        self.scales = nnx.Param(jnp.full((num_groups, *out_shape), 0.02 / 4.6, dtype), axes=group_axes)
        self.zeros = None if quantization.symmetric else nnx.Param(
            jnp.full((num_groups, *out_shape), 8, jnp.int8), axes=group_axes)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype), axes=self.out_axes) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[T, in...] -> [T, out...]."""
        params = dict(packed=self.packed, scales=self.scales, zeros=self.zeros, bias=self.bias)
        y = product_on_ranks(_product, x, params, in_axes=self.in_axes, out_axes=self.out_axes)
        return y.astype(out_dtype or x.dtype)


def _product(x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """[T, in...] and the arrays of an `Int4Linear` -> [T, out...]."""
    out_shape = arrays["packed"].shape[1:-1]
    num_out = math.prod(out_shape)
    flat = {name: array.reshape(-1, num_out) for name, array in arrays.items() if name != "packed"}
    weight = Int4Weight(arrays["packed"].reshape(-1, num_out, WORDS), flat["scales"], flat.get("zeros"))
    bias = flat["bias"][0] if "bias" in flat else None
    return int4_matmul(x.reshape(x.shape[0], -1), weight, bias).reshape(-1, *out_shape)


def check_blocks(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Raises InvalidInputError where the input features of a projection that is split along them, the attention's
    output and the MLP's, make no whole packed blocks for each rank."""
    for name, width in (("attention", config.num_heads * config.head_dim), ("MLP", config.intermediate_size)):
        if tensor_parallel_size > 1 and width % (BLOCK * tensor_parallel_size):
            raise InvalidInputError(
                "tensor_parallel_size", tensor_parallel_size, f"with 4-bit weights 1, or so many ranks that each has "
                f"a multiple of {BLOCK} features of the {name}'s {width}")
