"""The gated feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import Linear


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202); gate and up are one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, use_bias: bool, tensor_parallel_size: int,
                 dtype: jnp.dtype, rngs: nnx.Rngs):
        # The sharded axis comes second, so that gate and up of a rank's features meet on that rank.
        self.gate_up = Linear((hidden_size,), (2, intermediate_size), axes=(None, "mlp", "embed"), use_bias=use_bias,
                              keep_axes=tensor_parallel_size > 1, dtype=dtype, rngs=rngs)
        self.down = Linear((intermediate_size,), (hidden_size,), axes=("embed", "mlp"), use_bias=use_bias,
                           dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]."""
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])
