"""The on-device sampler: one program for every mixture of requests; work nobody asked for is skipped at run time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxserve.sampling import noise
from jaxserve.sampling.penalties import adjust
from jaxserve.sampling.state import SamplingInputs, SamplingState, count_tokens, forbid
from jaxserve.sampling.top import argmax
from jaxserve.sampling.truncation import cutoffs

MIN_TEMPERATURE = 1e-5
"""Below this a temperature counts as 0."""


def sample(logits: Array, inputs: SamplingInputs, state: SamplingState) -> tuple[Array, SamplingState]:
    """Chooses one token per sequence.

    The order is vLLM's: masks, bias, penalties, temperature, min-p, top-k, top-p, draw.

    Args:
      logits: float32 [S, V].
      inputs: the requests' parameters.
      state: rows of the slots.

    Returns:
      Token ids int32 [S], and the state with these tokens counted in the rows in use.
    """
    with jax.named_scope("sample"):
        plain = (inputs.uses_row == 0) & (inputs.temperature < MIN_TEMPERATURE) & (inputs.guided == 0)
        token_ids = lax.cond(jnp.all(plain), lambda: argmax(logits), lambda: _choose(logits, inputs, state))
        return token_ids, count_tokens(state, token_ids, inputs)


def _choose(logits: Array, inputs: SamplingInputs, state: SamplingState) -> Array:
    uses_row, draws = inputs.uses_row != 0, inputs.temperature >= MIN_TEMPERATURE
    logits = lax.cond(jnp.any(inputs.guided != 0), lambda: forbid(logits, inputs, state), lambda: logits)
    logits = lax.cond(jnp.any(uses_row), lambda: adjust(logits, inputs, state), lambda: logits)
    return lax.cond(jnp.any(draws), lambda: _draw(logits, inputs, draws), lambda: argmax(logits))


def _draw(logits: Array, inputs: SamplingInputs, draws: Array) -> Array:
    """Token ids [S] drawn from the softmax of what the request's limits leave; the likeliest where not `draws`.

    Token i wins a race by its speed, probability / exponential, so its chance is its probability. Unlike the
    inversion of a cumulative sum this is insensitive to rounding: a change of the logits by e changes the choice
    with a probability of order e.
    """
    best = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)  # all forbidden: no NaN
    # Subtract before dividing: tiny temperatures cannot overflow.
    below = (best - logits) / jnp.where(draws, inputs.temperature, 1.0)[:, None]
    cutoff = cutoffs(below, inputs, draws)
    keys = noise.position_keys(inputs.seed_low, inputs.seed_high, inputs.position)
    speed = jnp.exp(-below) / noise.exponential(keys, logits.shape[-1])
    return argmax(jnp.where(draws[:, None], jnp.where(below <= cutoff[:, None], speed, -1.0), -below))
