"""Token embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.linear import Axes
from jaxserve.parallel import replicate

_init_weight = nnx.initializers.normal(stddev=0.02)


class Embedding(nnx.Module):
    """One row of width D per token of the vocabulary.

    Args:
      axes: logical names of the table's axes.
    """

    def __init__(self, vocab_size: int, width: int, *, axes: Axes, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_init_weight(rngs.params(), (vocab_size, width), dtype), axes=axes)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """[T] int32 -> [T, D]. Ids are checked on the host; one out of range reads the nearest row, never beyond."""
        return replicate(jnp.take(self.weight.get_value(), token_ids, axis=0, mode="clip"))
