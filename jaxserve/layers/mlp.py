"""The gated feed-forward block."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import QuantizationConfig
from jaxserve.layers.quantized import make_linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202); gate and up are one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, use_bias: bool, tensor_parallel_size: int,
                 quantization: QuantizationConfig | None, dtype: jnp.dtype, rngs: nnx.Rngs):
        linear = partial(make_linear, use_bias=use_bias, quantization=quantization, dtype=dtype, rngs=rngs)
        # The sharded axis comes second, so that gate and up of a rank's features meet on that rank.
        self.gate_up = linear((hidden_size,), (2, intermediate_size), axes=(None, "mlp", "embed"),
                              keep_axes=tensor_parallel_size > 1)
        self.down = linear((intermediate_size,), (hidden_size,), axes=("embed", "mlp"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])
