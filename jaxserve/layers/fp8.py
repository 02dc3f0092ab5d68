"""Linear projections with 8-bit floating-point weights and activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.layers.linear import Axes
from jaxserve.layers.ranks import product_on_ranks
from pallas_kernels.dispatch import Target, target_of

FP8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FP8).max)
"""448."""
OLDEST_GPU = (8, 9)
"""Compute capability of the first cards that multiply such numbers (Ada; then Hopper and Blackwell)."""

_init_weight = nnx.initializers.normal(stddev=0.02)
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


class Fp8Linear(nnx.Module):
    """`Linear` in 8 bits, "W8A8": weights and activations are float8_e4m3fn (Micikevicius et al. 2022,
    arXiv:2209.05433), weights with a float32 scale for each output channel, activations with one for each row, found
    on the fly ("FP8 dynamic" of compressed-tensors, and of fbgemm). Products are summed in float32.

    On a GPU a projection is one cuBLASLt product of 8-bit operands. Elsewhere the same numbers are multiplied as
    float32, by way of a float32 copy of the weight.

    Under tensor parallelism each rank finds the scales of the features that it has.

    Args:
      in_shape, out_shape, axes, use_bias: as for `Linear`.
    """

    def __init__(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], *, axes: Axes, use_bias: bool = False,
                 dtype: jnp.dtype, rngs: nnx.Rngs):
        self.in_axes, self.out_axes = axes[len(out_shape):], axes[:len(out_shape)]
        weight, scales = quantize_rows(_init_weight(rngs.params(), (math.prod(out_shape), math.prod(in_shape)), dtype))
        self.weight = nnx.Param(weight.reshape(*out_shape, *in_shape), axes=axes)
        self.scales = nnx.Param(scales.reshape(out_shape), axes=self.out_axes)
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype), axes=self.out_axes) if use_bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[T, in...] -> [T, out...].

        Raises:
          NotImplementedError: the program is for an NVIDIA GPU that is too old.
        """
        params = dict(weight=self.weight, scales=self.scales, bias=self.bias)
        y = product_on_ranks(_product, x, params, in_axes=self.in_axes, out_axes=self.out_axes)
        return y.astype(out_dtype or x.dtype)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[T, K] -> float8 [T, K] and float32 scales [T, 1] whose product it nearly is; a row's largest number becomes
    448."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    # Times, as XLA would have it anyway: so every backend rounds alike. The least is for rows of zeros.
    scales = jnp.maximum(largest * (1 / LARGEST), jnp.finfo(jnp.float32).tiny)
    return (wide / scales).astype(FP8), scales


def _product(x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """[T, in...] and the arrays of an `Fp8Linear` -> [T, out...] in x's dtype."""
    out_shape = arrays["scales"].shape
    num_out = math.prod(out_shape)
    rows, row_scales = quantize_rows(x.reshape(x.shape[0], -1))
    sums = _dot(rows, arrays["weight"].reshape(num_out, -1), x.dtype)
    y = sums.astype(jnp.float32) * row_scales * arrays["scales"].reshape(num_out)
    if "bias" in arrays:
        y = y + arrays["bias"].reshape(num_out)
    return y.astype(x.dtype).reshape(-1, *out_shape)


def _dot(rows: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """float8 [T, K], [N, K] -> [T, N] in bfloat16 for bfloat16 activations, else float32."""
    if not _has_fp8_products(target_of()):
        return lax.dot_general(rows.astype(jnp.float32), weight.astype(jnp.float32), _CONTRACT_LAST)
    # Sums can be larger than float16 holds. As bfloat16 they are half the bytes, which count in long prompts' steps.
    sum_dtype = dtype if dtype == jnp.bfloat16 else jnp.float32
    num_rows = rows.shape[0]
    if num_rows == 1:  # XLA would take it for a matrix times a vector, and convert the weight for that
        rows = jnp.pad(rows, ((0, 15), (0, 0)))
    # At the default precision cuBLASLt would sum in its "fast accumulation", of fewer bits than float32.
    sums = lax.dot_general(rows, weight, _CONTRACT_LAST, precision=lax.Precision.HIGHEST,
                           preferred_element_type=sum_dtype)
    return sums[:num_rows]


def _has_fp8_products(target: Target) -> bool:
    if target.capability is None:  # not an NVIDIA GPU
        return False
    if target.capability < OLDEST_GPU:
        needed, found = (".".join(map(str, version)) for version in (OLDEST_GPU, target.capability))
        raise NotImplementedError(f"fp8 weights: need a GPU of compute capability {needed} or newer, not {found}")
    return True
