"""The decoder over whole sequences, without a KV cache: for training and for checks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.layers.attention import DenseBatch
from jaxserve.models.decoder import Decoder


def forward(model: Decoder, token_ids: jax.Array, *, positions: jax.Array | None = None,
            segment_ids: jax.Array | None = None) -> jax.Array:
    """Logits after every token; differentiable.

    Sequences shorter than Bt's longest are padded at the end: causality keeps the padding out of what comes before.

    Args:
      token_ids: [Bt, T] int32.
      positions: [Bt, T] int32, by default 0 .. T-1 in every row.
      segment_ids: [Bt, T] int32, for several sequences packed into a row: a token sees only its own segment's.

    Returns:
      float32 [Bt, T, V].
    """
    num_runs, length = token_ids.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), token_ids.shape)
    positions = positions.reshape(-1)
    batch = DenseBatch(positions, None if segment_ids is None else segment_ids.reshape(-1), num_runs)
    hidden, _ = model(token_ids.reshape(-1), positions, ((None, None),) * len(model.layers), batch)
    return model.logits(hidden).reshape(num_runs, length, -1)
