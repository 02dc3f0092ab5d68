"""The one place that chooses how the weights of projections are stored."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.layers.fp8 import Fp8Linear
from jaxserve.layers.int4 import Int4Linear, check_blocks
from jaxserve.layers.linear import Axes, Linear


def make_linear(in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, quantization: QuantizationConfig | None,
                axes: Axes, use_bias: bool, keep_axes: bool = False, dtype: jnp.dtype,
                rngs: nnx.Rngs) -> Linear | Int4Linear | Fp8Linear:
    """The projection that the model's quantisation asks for."""
    if quantization is None:
        return Linear(in_shape, out_shape, axes=axes, use_bias=use_bias, keep_axes=keep_axes, dtype=dtype, rngs=rngs)
    if quantization.kind == "fp8":
        return Fp8Linear(in_shape, out_shape, axes=axes, use_bias=use_bias, dtype=dtype, rngs=rngs)
    return Int4Linear(in_shape, out_shape, axes=axes, use_bias=use_bias, quantization=quantization, dtype=dtype,
                      rngs=rngs)


def check_quantization(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Raises InvalidInputError where quantised weights cannot be divided over the ranks."""
    if config.quantization is not None and config.quantization.kind == "int4":
        check_blocks(config, tensor_parallel_size)
