"""Embeddings: the decoder's last hidden states, pooled. Without the KV cache; several prompts are computed at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from jaxserve import compat
from jaxserve.errors import InvalidInputError, PromptTooLongError
from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.sharding import replicated
from pallas_kernels.rope_kv_write import split_and_rotate

if TYPE_CHECKING:
    from jaxserve.layers.attention import Cache, HeadTransform

logger = logging.getLogger(__name__)

Pooling = Literal["last", "mean"]
Batch = Sequence[Sequence[int]]
"""Token ids of prompts that one program takes together."""
QUERY_ROWS = 64
"""Scores of so many queries with all keys are in memory at a time."""
MAX_PROMPTS = 32
"""Of a batch. With these two a batch needs no more memory than the engine's largest step, for which the KV cache leaves
room."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _PackedBatch:
    """Causal attention inside each of several prompts that lie one behind the other.

    Attributes:
      positions: [T] int32, in the prompt; T is a multiple of QUERY_ROWS, or less.
      prompts: [T] int32, which one it is.
    """

    positions: jax.Array
    prompts: jax.Array

    def attend(self, qkv: jax.Array, heads: HeadTransform, k_cache: Cache, v_cache: Cache, *, scale: float,
               window: int | None) -> tuple[jax.Array, Cache, Cache]:
        """See `AttentionBatch.attend`; there are no caches."""
        q, k, v = split_and_rotate(qkv, heads.cos, heads.sin, q_norm=heads.q_norm, k_norm=heads.k_norm,
                                   epsilon=heads.epsilon)
        rows = min(len(q), QUERY_ROWS)

        def tile(index: jax.Array, q: jax.Array) -> jax.Array:
            """Puts the results of some queries in their place: a second array of that size is not needed."""
            start = index * rows
            queries, positions, prompts = (
                jax.lax.dynamic_slice_in_dim(each, start, rows) for each in (q, self.positions, self.prompts))
            distance = positions[:, None] - self.positions
            visible = (prompts[:, None] == self.prompts) & (distance >= 0)
            if window is not None:
                visible &= distance < window
            scores = jnp.einsum("tkgh,skh->kgts", queries, k, preferred_element_type=jnp.float32) * scale
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
            return jax.lax.dynamic_update_slice_in_dim(q, jnp.einsum("kgts,skh->tkgh", weights, v), start, 0)

        return jax.lax.fori_loop(0, len(q) // rows, tile, q), k_cache, v_cache


class Embedder:
    """Batches are padded to the sizes of the engine's own steps; each is a program, compiled when first needed.

    Attributes:
      max_tokens: of a prompt, which is computed in one go.
    """

    def __init__(self, blueprint: Blueprint):
        config = blueprint.config
        assert config.max_model_len and config.max_num_batched_tokens, "config is not resolved"
        self.max_tokens = min(config.max_model_len, config.max_num_batched_tokens)
        self._max_batch = config.max_num_batched_tokens
        self._blueprint = blueprint
        self._programs: dict[int, Compiled] = {}

    def check(self, token_ids: Sequence[int], field: str) -> None:
        """Raises PromptTooLongError for a prompt that is."""
        if len(token_ids) > self.max_tokens:
            raise PromptTooLongError(field, f"{len(token_ids)} tokens", f"at most {self.max_tokens} tokens for an "
                                     "embedding (the lesser of max_model_len and max_num_batched_tokens)")

    def batches(self, prompts: Batch) -> list[Batch]:
        """Prompts that passed `check`, in their order; as many together as fit, up to MAX_PROMPTS."""
        found: list[list[Sequence[int]]] = []
        room = 0
        for prompt in prompts:
            if len(prompt) > room or len(found[-1]) == MAX_PROMPTS:
                found.append([])
                room = self._max_batch
            found[-1].append(prompt)
            room -= len(prompt)
        return [*found]

    def is_ready(self, batch: Batch) -> bool:
        """Whether `prepare` and `dispatch` would return at once."""
        return self._num_rows(batch) in self._programs

    def prepare(self, batch: Batch) -> None:
        """Compiles the batch's program unless that has been done. In any thread; two at once might both do it."""
        if not self.is_ready(batch):
            start, num_rows = time.monotonic(), self._num_rows(batch)
            self._programs[num_rows] = self._lower(num_rows).compile()
            compat.return_freed_memory()
            logger.info("compiled embeddings T=%d in %.1f s", num_rows, time.monotonic() - start)

    def dispatch(self, leaves: Sequence[jax.Array], batch: Batch, pooling: Pooling) -> jax.Array:
        """Sends a batch on its way, if need be after `prepare`; `vectors` waits for it.

        Args:
          leaves: the weights, as `Blueprint.leaves`.
        """
        self.prepare(batch)
        num_rows = self._num_rows(batch)
        pooled: jax.Array = self._programs[num_rows](tuple(leaves), *_arrays(batch, pooling, num_rows))
        return pooled

    def _num_rows(self, batch: Batch) -> int:
        """Of its program."""
        size = self._blueprint.buckets.for_mixed(sum(map(len, batch))).num_tokens
        return size if size <= QUERY_ROWS else -(-size // QUERY_ROWS) * QUERY_ROWS

    def _lower(self, num_rows: int) -> jax.stages.Lowered:
        whole = replicated(self._blueprint.mesh)
        jitted = jax.jit(partial(_pooled, self._blueprint), out_shardings=whole)
        return jitted.lower(self._blueprint.leaves, jax.ShapeDtypeStruct((3, num_rows), jnp.int32, sharding=whole),
                            jax.ShapeDtypeStruct((num_rows,), jnp.float32, sharding=whole))


def check_pooling(pooling: Any) -> None:
    """Raises InvalidInputError for one that there is not."""
    if pooling not in get_args(Pooling):
        raise InvalidInputError("pooling", pooling, f"one of {', '.join(get_args(Pooling))}")


def vectors(pooled: jax.Array, batch: Batch, *, normalize: bool) -> list[np.ndarray]:
    """float32 [D] for each prompt of what `dispatch` gave, once it is there; of length 1 if `normalize`."""
    found = np.asarray(pooled)[: len(batch)].copy()  # the rows of prompts that there are not need not be kept
    if normalize:
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return [*found]


def _arrays(batch: Batch, pooling: Pooling, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [3, T]: token ids, positions and prompts; float32 [T]: each token's share in the vector of its prompt. The
    padding is one more prompt, which has no shares."""
    ints = np.zeros((3, num_rows), np.int32)
    ints[2] = len(batch)
    shares = np.zeros(num_rows, np.float32)
    start = 0
    for index, prompt in enumerate(batch):
        end = start + len(prompt)
        ints[:, start:end] = prompt, np.arange(len(prompt)), np.full(len(prompt), index)
        if pooling == "mean":
            shares[start:end] = 1 / len(prompt)
        else:
            shares[end - 1] = 1
        start = end
    return ints, shares


def _pooled(blueprint: Blueprint, leaves: Any, ints: jax.Array, shares: jax.Array) -> jax.Array:
    """float32 [MAX_PROMPTS, D]: for each prompt the sum of its tokens' states, each times its share."""
    token_ids, positions, prompts = ints
    with jax.sharding.use_abstract_mesh(blueprint.mesh.abstract_mesh):
        nothing = ((None, None),) * blueprint.model.num_layers
        hidden, _ = blueprint.decoder(leaves)(token_ids, positions, nothing, _PackedBatch(positions, prompts))
    of_prompt = jnp.where(jnp.arange(MAX_PROMPTS)[:, None] == prompts, shares, 0)
    # As a product, whose order of summation is fixed; in float32, which GPUs would round to 10 bits.
    return jnp.dot(of_prompt, hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
