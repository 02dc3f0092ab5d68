"""Projections with 4-bit weights against the same weights written out."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.errors import InvalidInputError, UnsupportedModelError
from jaxserve.layers.quantized import Int4Linear
from jaxserve.models.decoder import Decoder
from jaxserve.models.forward import forward
from jaxserve.models.registry import model_config_from_hf
from tests.models.helpers import tiny_checkpoint


def tiny_config() -> ModelConfig:
    return model_config_from_hf(tiny_checkpoint("Llama")[1])


def dense_weight(layer: Int4Linear, num_in: int) -> np.ndarray:
    """[K, N] float64, nibble by nibble from the layout's definition."""
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


@pytest.mark.parametrize("quantization", [QuantizationConfig(), QuantizationConfig(group_size=32, symmetric=False),
                                          QuantizationConfig(group_size=None)])
@pytest.mark.parametrize(("in_shape", "use_bias"), [((128,), False), ((3, 64), True)])
def test_equals_the_weights_written_out(in_shape: tuple[int, ...], use_bias: bool,
                                        quantization: QuantizationConfig) -> None:
    layer = Int4Linear(in_shape, (2, 24), axes=(None,) * (2 + len(in_shape)), use_bias=use_bias,
                       quantization=quantization, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    if layer.zeros is not None:
        layer.zeros.set_value(jnp.asarray(rng.integers(0, 17, layer.zeros.get_value().shape), jnp.int8))
    if layer.bias is not None:
        layer.bias.set_value(jnp.asarray(rng.standard_normal((2, 24)), jnp.float32))
    x = rng.standard_normal((5, *in_shape)).astype(np.float32)
    expected = x.reshape(5, -1).astype(np.float64) @ dense_weight(layer, int(np.prod(in_shape)))
    expected = expected.reshape(5, 2, 24) + (0 if layer.bias is None else np.asarray(layer.bias.get_value()))
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_a_decoder_with_4_bit_weights_runs_and_differs_per_layer() -> None:
    config = replace(tiny_config(), quantization=QuantizationConfig(group_size=64))
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert isinstance(model.layers[0].mlp.down, Int4Linear)
    logits = forward(model, jnp.arange(12, dtype=jnp.int32)[None])
    assert logits.shape == (1, 12, config.vocab_size) and bool(jnp.isfinite(logits).all())
    qkv = model.layers[0].attention.qkv
    assert isinstance(qkv, Int4Linear)
    flipped = qkv.packed
    flipped.set_value(jax.lax.bitwise_not(flipped.get_value()))
    assert not np.allclose(forward(model, jnp.arange(12, dtype=jnp.int32)[None]), logits, atol=1e-3)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="group_size"):
        QuantizationConfig(group_size=48)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="4-bit"):
        Decoder(replace(tiny_config(), quantization=QuantizationConfig()), tensor_parallel_size=2, rngs=nnx.Rngs(0))
