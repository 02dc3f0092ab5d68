"""Log-probabilities of chosen tokens, of prompts, and of the likeliest alternatives: always of the raw logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling.top import top_k

Logprobs = tuple[Array, Array, Array, Array]
"""Of R tokens: log-probability float32 [R], rank int32 [R] (1 = likeliest), the ids int32 [R, MAX_LOGPROBS] and
log-probabilities float32 [R, MAX_LOGPROBS] of the likeliest tokens, best first."""


def logprobs(logits: Array, token_ids: Array, wanted: Array) -> Logprobs:
    """Log-probabilities of `token_ids` [R] under raw float32 logits [R, V]; zeros if `wanted` (any shape) is all 0."""
    with jax.named_scope("logprobs"):
        return lax.cond(
            jnp.any(wanted != 0), lambda: _logprobs(logits, token_ids), lambda: _zeros(token_ids.shape[0])
        )


def prompt_logprobs(
    hidden: Array, logits_fn: Callable[[Array], Array], target_ids: Array, num_rows: Array, chunk: int = 64
) -> Logprobs:
    """Log-probabilities of the first `num_rows` of T target tokens; logits exist for `chunk` rows at a time.

    Args:
      hidden: [T, D], row t predicts target_ids[t].
      logits_fn: float32 logits [R, V] of hidden rows [R, D].
      target_ids: int32 [T].
      num_rows: int32 scalar. 0 costs nothing; rows from there on hold nothing of meaning.
      chunk: rows at a time.
    """
    num_tokens = target_ids.shape[0]
    chunk = min(chunk, num_tokens)

    def body(i: Array, filled: Logprobs) -> Logprobs:
        start = jnp.minimum(i * chunk, num_tokens - chunk)  # the last chunk may do some rows again
        rows = lax.dynamic_slice_in_dim(hidden, start, chunk)
        values = _logprobs(logits_fn(rows), lax.dynamic_slice_in_dim(target_ids, start, chunk))
        update = lax.dynamic_update_slice_in_dim
        return tuple(update(old, new, start, axis=0) for old, new in zip(filled, values, strict=True))  # type: ignore[return-value]

    with jax.named_scope("prompt_logprobs"):
        return lax.fori_loop(0, (num_rows + chunk - 1) // chunk, body, _zeros(num_tokens))


def _zeros(num_rows: int) -> Logprobs:
    top = (num_rows, MAX_LOGPROBS)
    return (
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros(num_rows, jnp.int32),
        jnp.zeros(top, jnp.int32),
        jnp.zeros(top, jnp.float32),
    )


def _logprobs(logits: Array, token_ids: Array) -> Logprobs:
    best = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(jnp.sum(jnp.exp(logits - best), axis=-1, keepdims=True))

    def normalise(values: Array) -> Array:
        return (values - best) - log_total  # in this order: large logits must not swallow a small log_total

    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top_logits, top_ids = top_k(logits, MAX_LOGPROBS)
    return normalise(chosen)[:, 0], rank, top_ids, normalise(top_logits)
