"""Quantised projections written out by numpy, from the definitions of their formats; and models that have them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.config import ModelConfig, QuantizationConfig, RopeConfig
from jaxserve.layers.fp8 import Fp8Linear
from jaxserve.layers.int4 import Int4Linear
from jaxserve.models.decoder import Decoder
from jaxserve.models.params import abstract_params, model_from_params
from jaxserve.models.spec import ParamSpec

CONFIGS = {"int4": QuantizationConfig(group_size=64, symmetric=False), "fp8": QuantizationConfig(kind="fp8")}


def model_config(quantization: QuantizationConfig | None, **sizes: Any) -> ModelConfig:
    """A small decoder whose projections can be divided by 4, in whole blocks of 128 features: 512 on the input side
    of `out`, 1024 of `down`."""
    options = dict(hidden_size=192, intermediate_size=1024, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=32,
                   vocab_size=64) | sizes
    return ModelConfig(architecture="LlamaForCausalLM", max_position=64, rms_norm_eps=1e-6, rope=RopeConfig(),
                       quantization=quantization, **options)


def random_model(config: ModelConfig, *, tensor_parallel_size: int = 1) -> Decoder:
    """Every parameter random, made by numpy, for JAX would compile a program per shape."""
    rng = np.random.default_rng(0)
    specs = abstract_params(config, tensor_parallel_size=tensor_parallel_size)
    params = {path: jnp.asarray(_random(path, spec, rng)) for path, spec in specs.items()}
    return model_from_params(config, params, tensor_parallel_size=tensor_parallel_size)


def _random(path: str, spec: ParamSpec, rng: np.random.Generator) -> np.ndarray:
    if path.endswith("packed"):
        return rng.integers(-(2**31), 2**31, spec.shape, np.int32)
    if path.endswith("zeros"):
        return rng.integers(0, 17, spec.shape, np.int8)
    if path.endswith("scales"):  # for weights that deviate by about 0.15, from nibbles or from a normal distribution
        return rng.uniform(0.02, 0.04, spec.shape).astype(spec.dtype)
    return rng.normal("norm" in path, 5 if spec.dtype.itemsize == 1 else 0.15, spec.shape).astype(spec.dtype)


def int4_dense(layer: Int4Linear, num_in: int) -> np.ndarray:
    """Weights [K, N] float64, nibble by nibble from the layout's definition."""
    packed = np.asarray(layer.packed.get_value())
    num_blocks, num_words = packed.shape[0], packed.shape[-1]
    packed = packed.reshape(num_blocks, -1, num_words)
    scales = np.asarray(layer.scales.get_value(), np.float64).reshape(-1, packed.shape[1])
    zeros = np.full_like(scales, 8)
    if layer.zeros is not None:
        zeros = np.asarray(layer.zeros.get_value()).reshape(scales.shape)
    group = num_blocks * 128 // len(scales)
    weight = np.zeros((num_in, packed.shape[1]))
    for feature in range(num_in):
        block, lane = divmod(feature, 128)
        slab, within = divmod(lane, 32)
        word, half = divmod(within, 2)
        nibble = (packed[block, :, word].view(np.uint32) >> (4 * slab + 16 * half)) & 15
        weight[feature] = (nibble - zeros[feature // group]) * scales[feature // group]
    return weight


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest number of 4 exponent and 3 mantissa bits, ties to even; float64. 448 is the largest."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6)
    step = 2.0 ** (exponent - 3)
    rounded = np.round(np.asarray(x, np.float64) / step) * step
    assert np.abs(rounded).max() <= 448
    return rounded


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of numbers of e4m3, and float32 scales [T, 1] that bring each row's largest to 448."""
    x = x.astype(np.float32)
    scales = np.maximum(np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448), np.finfo(np.float32).tiny)
    return e4m3(x / scales), scales


def fp8_dense(layer: Fp8Linear, num_in: int) -> np.ndarray:
    """Weights [K, N] float64, byte by byte from the format's definition."""
    codes = np.asarray(layer.weight.get_value()).view(np.uint8).astype(int).reshape(-1, num_in)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    assert ((codes & 127) != 127).all()  # not a number
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    scales = np.asarray(layer.scales.get_value(), np.float64).reshape(-1, 1)
    return (np.where(codes & 128, -value, value) * scales).T


def fp8_product(x: np.ndarray, weight: np.ndarray, num_ranks: int = 1) -> np.ndarray:
    """[T, K] x [K, N] -> [T, N] float64; each rank has the scales of its own part of K."""
    total = np.zeros((len(x), weight.shape[1]))
    for part, rows in zip(np.split(x, num_ranks, axis=1), np.split(weight, num_ranks), strict=True):
        quantized, scales = quantize_rows(part)
        total += quantized * scales.astype(np.float64) @ rows
    return total
