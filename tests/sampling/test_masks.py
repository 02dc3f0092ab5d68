"""Masks of guided sequences: only what they allow is chosen, greedy or drawn, and others are left alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.state import init_state, mask_words, set_allowed
from tests.sampling.helpers import choose, make_inputs

VOCAB_SIZE = 77  # not a multiple of 32


def state_with(allowed: list[list[int]]):
    words = np.zeros((len(allowed), mask_words(VOCAB_SIZE)), np.uint32)
    for row, token_ids in enumerate(allowed):
        for token_id in token_ids:
            words[row, token_id // 32] |= np.uint32(1 << token_id % 32)
    return set_allowed(init_state(len(allowed), VOCAB_SIZE), jnp.arange(len(allowed)), jnp.asarray(words))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_chosen(temperature: float) -> None:
    rng = np.random.default_rng(0)
    allowed = [sorted(rng.choice(VOCAB_SIZE, 3, replace=False).tolist()) for _ in range(6)] + [[31], [32], [76]]
    rows = range(len(allowed))
    logits = np.zeros((len(allowed), VOCAB_SIZE))
    for row, token_ids in enumerate(allowed):
        logits[row, token_ids] = rng.normal(size=len(token_ids)) - 50  # far from likely
    for seed in range(5):
        inputs = make_inputs(len(allowed), seed=seed, temperature=temperature, slot=rows, guided=[1] * 8 + [0])
        chosen = choose(logits, inputs, state_with(allowed))
        assert all(token_id in allowed[row] for row, token_id in enumerate(chosen[:-1]))
        assert chosen[-1] != 76  # not guided: its row does not count
        if temperature == 0:
            expected = [token_ids[int(logits[row, token_ids].argmax())] for row, token_ids in enumerate(allowed[:-1])]
            assert chosen[:-1].tolist() == expected


def test_with_penalties_and_limits() -> None:
    """A mask and a row of biases and counts at a time."""
    inputs = make_inputs(1, temperature=1.0, top_k=2, guided=1, uses_row=1, repetition=1.5)
    assert choose(np.zeros(VOCAB_SIZE), inputs, state_with([[40]]))[0] == 40
