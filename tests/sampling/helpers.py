"""Inputs for the sampler with neutral values for all that a test does not set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.rows import seed_words
from jaxserve.sampling.sampler import sample
from jaxserve.sampling.state import SamplingInputs, SamplingState, init_state

NEUTRAL = {
    "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "repetition": 1.0, "top_k": 0,
    "position": 0, "slot": 0, "uses_row": 0, "guided": 0, "wants_logprobs": 0,
}  # fmt: skip


def make_inputs(num_rows: int, seed: Any = 0, **values: Any) -> SamplingInputs:
    """Scalars hold for all rows, sequences give one value per row."""
    seeds = np.broadcast_to(np.asarray(seed, object), (num_rows,))
    words = np.stack([seed_words(int(value)) for value in seeds])
    fields = {
        name: jnp.asarray(np.broadcast_to(values.pop(name, value), (num_rows,)).astype(
            np.float32 if isinstance(value, float) else np.int32))
        for name, value in NEUTRAL.items()
    }  # fmt: skip
    assert not values, f"unknown fields {list(values)}"
    return SamplingInputs(seed_low=jnp.asarray(words[:, 0]), seed_high=jnp.asarray(words[:, 1]), **fields)


jit_sample = jax.jit(sample)


def choose(logits: Any, inputs: SamplingInputs, state: SamplingState | None = None) -> np.ndarray:
    """Token ids [S] for logits [S, V] or [V] (the same for all rows)."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (inputs.top_k.shape[0], np.shape(logits)[-1]))
    return np.asarray(jit_sample(logits, inputs, state or init_state(1, logits.shape[-1]))[0])
