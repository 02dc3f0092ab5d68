"""Bias and penalties: what changes logits depending on the request and on its tokens so far."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxserve.sampling.state import SamplingInputs, SamplingState


def adjust(logits: Array, inputs: SamplingInputs, state: SamplingState) -> Array:
    """Logits [S, V] after bias, then repetition, frequency and presence penalties: vLLM's order.

    Repetition (Keskar et al., arXiv:1909.05858) looks at prompt and output, the other two only at the output.
    """
    bias, seen, counts = state.bias[inputs.slot], state.prompt_mask[inputs.slot], state.output_counts[inputs.slot]
    repetition = inputs.repetition[:, None]
    biased = logits + bias
    penalised = jnp.where(biased > 0, biased / repetition, biased * repetition)
    result = jnp.where(seen | (counts > 0), penalised, biased)
    result -= inputs.frequency[:, None] * counts + inputs.presence[:, None] * (counts > 0)
    return jnp.where(inputs.uses_row[:, None] != 0, result, logits)
