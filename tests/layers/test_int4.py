"""Projections with 4-bit weights against the same weights written out."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import QuantizationConfig
from jaxserve.layers.int4 import Int4Linear
from tests.layers.quantized import int4_dense


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
    expected = x.reshape(5, -1).astype(np.float64) @ int4_dense(layer, int(np.prod(in_shape)))
    expected = expected.reshape(5, 2, 24) + (0 if layer.bias is None else np.asarray(layer.bias.get_value()))
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)
