"""What the sampler is told about each sequence: per step (`SamplingInputs`) and across steps (`SamplingState`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """One entry per sequence of the step, all of shape [S]. Padding rows: temperature 0, `slot` the trash row.

    Attributes:
      temperature: float32, 0 is greedy.
      top_p: float32, 1 keeps all. min_p: float32, 0 keeps all. top_k: int32, 0 keeps all.
      presence, frequency, repetition: float32 penalties, neutral at 0, 0 and 1.
      seed_low, seed_high: int32, the bits of the request's 64-bit seed.
      position: int32, index in its sequence of the token being chosen (the prompt's first token has index 0).
      slot: int32, the sequence's row in `SamplingState`; num_slots (the trash row) for padding.
      uses_row: int32 or bool, whether that row applies and keeps count of the tokens chosen. 0 for padding rows and
        for sequences whose prompt is not yet complete, so that the token drawn for them is not counted.
      guided: int32 or bool, whether only the tokens of its row's `allowed` may be chosen.
      wants_logprobs: int32 or bool.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    presence: Array
    frequency: Array
    repetition: Array
    seed_low: Array
    seed_high: Array
    position: Array
    slot: Array
    uses_row: Array
    guided: Array
    wants_logprobs: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """One row per slot and a last one that nobody reads; donated through every step.

    Attributes:
      prompt_mask: bool [num_slots + 1, V], whether the prompt holds the token.
      output_counts: int16 [num_slots + 1, V], how often it was generated (stops counting at 32767).
      bias: float32 [num_slots + 1, V], added to the logit; -inf forbids the token.
      allowed: uint32 [num_slots + 1, ceil(V / 32)], for guided sequences: token i may be chosen if bit i % 32 of word
        i // 32 is set.
    """

    prompt_mask: Array
    output_counts: Array
    bias: Array
    allowed: Array

    @property
    def num_slots(self) -> int:
        return self.bias.shape[0] - 1


def init_state(num_slots: int, vocab_size: int) -> SamplingState:
    """Rows that change nothing: 7 1/8 * (num_slots + 1) * vocab_size bytes."""
    shape = (num_slots + 1, vocab_size)
    return SamplingState(jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.int16), jnp.zeros(shape, jnp.float32),
                         jnp.zeros((num_slots + 1, mask_words(vocab_size)), jnp.uint32))


def mask_words(vocab_size: int) -> int:
    """32-bit words with a bit for each token."""
    return -(-vocab_size // 32)


@partial(jax.jit, donate_argnums=0)
def set_row(state: SamplingState, slot: Array, prompt_mask: Array, output_counts: Array, bias: Array) -> SamplingState:
    """Rewrites a slot (int32 scalar) in place with what `rows.build_rows` made; `state` is donated."""
    return replace(state, prompt_mask=state.prompt_mask.at[slot].set(prompt_mask),
                   output_counts=state.output_counts.at[slot].set(output_counts), bias=state.bias.at[slot].set(bias))


@partial(jax.jit, donate_argnums=0)
def set_bias(state: SamplingState, slot: Array, bias: Array) -> SamplingState:
    """Rewrites only a slot's bias, in place. For a running request: the device may have counted a token more."""
    return replace(state, bias=state.bias.at[slot].set(bias))


@partial(jax.jit, donate_argnums=0)
def set_allowed(state: SamplingState, slots: Array, words: Array) -> SamplingState:
    """Rewrites the masks of slots [N] in place with words [N, W]; the trash row may come any number of times."""
    return replace(state, allowed=state.allowed.at[slots].set(words))


def forbid(logits: Array, inputs: SamplingInputs, state: SamplingState) -> Array:
    """Logits [S, V] with -inf for what the masks of guided sequences do not allow."""
    # By a lookup for each token, so that a vocabulary sharded over devices is masked where it lies.
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    words = state.allowed.at[inputs.slot[:, None], (token_ids // 32)[None]].get(mode="promise_in_bounds")
    allowed = (words >> (token_ids % 32)) & 1 != 0
    return jnp.where(allowed | (inputs.guided == 0)[:, None], logits, -jnp.inf)


def count_tokens(state: SamplingState, token_ids: Array, inputs: SamplingInputs) -> SamplingState:
    """Adds each chosen token [S] to the counts of its row, in place; rows not in use count into the trash row."""
    rows = jnp.where(inputs.uses_row != 0, inputs.slot, state.num_slots)
    counts = state.output_counts[rows, token_ids]
    counts = counts + (counts < jnp.iinfo(jnp.int16).max).astype(jnp.int16)
    return replace(state, output_counts=state.output_counts.at[rows, token_ids].set(counts))
