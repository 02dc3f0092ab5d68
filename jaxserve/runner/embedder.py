"""A prompt's embedding: the decoder's last hidden states, pooled. Without the KV cache, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import InvalidInputError, PromptTooLongError
from jaxserve.layers.attention import DenseBatch
from jaxserve.models.params import merge
from jaxserve.runner.blueprint import Blueprint

Pooling = Literal["last", "mean"]
MAX_TOKENS = 4096
"""Scores of all pairs of a prompt's tokens are in memory at a time."""
_FEWEST_ROWS = 16


class Embedder:
    """Prompts are padded to powers of two; each is a program, compiled when first needed."""

    def __init__(self, blueprint: Blueprint):
        config = blueprint.config
        assert config.max_model_len and config.max_num_batched_tokens
        self.max_tokens = min(config.max_model_len, config.max_num_batched_tokens, MAX_TOKENS)
        self._run = jax.jit(partial(_pooled, blueprint), static_argnames="pooling")

    def embed(self, leaves: Sequence[jax.Array], token_ids: Sequence[int], pooling: Pooling = "last",
              *, normalize: bool = True) -> np.ndarray:
        """float32 [D]: the last token's state, or the mean of all; of length 1 if `normalize`.

        Raises:
          InvalidInputError: the prompt is too long, or there is no such pooling.
        """
        if pooling not in get_args(Pooling):
            raise InvalidInputError("pooling", pooling, f"one of {', '.join(get_args(Pooling))}")
        count = len(token_ids)
        self.check(token_ids, "prompt")
        padded = np.zeros(max(_FEWEST_ROWS, 1 << (count - 1).bit_length()), np.int32)
        padded[:count] = token_ids
        state = np.asarray(self._run(tuple(leaves), padded, np.int32(count), pooling=pooling))
        return state / max(float(np.linalg.norm(state)), 1e-12) if normalize else state

    def check(self, token_ids: Sequence[int], field: str) -> None:
        """Raises PromptTooLongError for a prompt that is."""
        if len(token_ids) > self.max_tokens:
            raise PromptTooLongError(field, f"{len(token_ids)} tokens",
                                     f"at most {self.max_tokens} tokens for an embedding")


def _pooled(blueprint: Blueprint, leaves: Any, token_ids: jax.Array, count: jax.Array, *, pooling: str) -> jax.Array:
    """Causality keeps the padding, which comes last, out of what comes before."""
    with jax.sharding.use_abstract_mesh(blueprint.mesh.abstract_mesh):
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        nothing = ((None, None),) * blueprint.model.num_layers
        hidden, _ = merge(blueprint.graphdef, leaves)(token_ids, positions, nothing, DenseBatch(positions))
    hidden = hidden.astype(jnp.float32)
    if pooling == "last":
        return hidden[count - 1]
    return jnp.where((positions < count)[:, None], hidden, 0).sum(0) / count
