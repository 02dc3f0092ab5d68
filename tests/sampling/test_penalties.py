"""Bias, penalties and counts, against transformers and vLLM's formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from jaxserve.request import SamplingParams
from jaxserve.sampling.penalties import adjust
from jaxserve.sampling.rows import build_rows
from jaxserve.sampling.state import init_state, set_bias, set_row
from tests.sampling.helpers import choose, jit_sample, make_inputs

VOCAB_SIZE = 50


def state_of(params, prompt_ids, output_ids=(), slot=1, num_slots=2, **values):
    rows = build_rows(params, VOCAB_SIZE, prompt_ids, output_ids, **values)
    return set_row(init_state(num_slots, VOCAB_SIZE), slot, *rows)


def inputs_of(params, num_rows=1, **values):
    defaults = {"slot": 1, "uses_row": 1, "presence": params.presence_penalty, "repetition": params.repetition_penalty}
    return make_inputs(num_rows, **(defaults | {"frequency": params.frequency_penalty} | values))


def adjusted(logits, params, prompt_ids, output_ids=(), **values):
    state = state_of(params, prompt_ids, output_ids, **values)
    return np.asarray(jax.jit(adjust)(jnp.asarray(logits, jnp.float32)[None], inputs_of(params), state))[0]


@pytest.mark.parametrize("logit", [3.0, -3.0])
def test_which_penalty_looks_at_what(logit):
    """H05."""
    token, logits = 7, np.zeros(VOCAB_SIZE, np.float32)
    logits[token] = logit
    repetition, presence, frequency = (
        SamplingParams(repetition_penalty=2.0), SamplingParams(presence_penalty=1.0),
        SamplingParams(frequency_penalty=1.0),
    )  # fmt: skip
    prompt = [token, 3, token, token]
    for output in ([], [token], [token, token]):
        got = adjusted(logits, repetition, prompt, output)
        assert got[token] == (logit / 2 if logit > 0 else logit * 2)
        theirs = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([prompt + output]), torch.tensor(logits[None]))
        np.testing.assert_allclose(got, theirs[0].numpy(), rtol=1e-6)
        assert adjusted(logits, presence, prompt, output)[token] == logit - (len(output) > 0)
        assert adjusted(logits, frequency, prompt, output)[token] == logit - len(output)


def test_all_together_in_vllms_order():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=VOCAB_SIZE).astype(np.float32) * 3
    prompt, output = rng.integers(0, VOCAB_SIZE, 20).tolist(), rng.integers(0, VOCAB_SIZE, 30).tolist()
    params = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={3: 5.0, output[0]: -4.0}
    )
    expected = logits.astype(np.float64)
    expected[3] += 5
    expected[output[0]] -= 4
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(output):
        expected[token] -= 0.2 * output.count(token) + 0.4
    np.testing.assert_allclose(adjusted(logits, params, prompt, output), expected, rtol=1e-5, atol=1e-5)


def test_chosen_tokens_are_counted_on_the_device():
    """Step after step the counts equal those of rows rebuilt from the output."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.1)
    logits = np.random.default_rng(3).normal(size=(1, VOCAB_SIZE)).astype(np.float32)
    state = state_of(params, [1, 2])
    output: list[int] = []
    for position in range(12):
        inputs = inputs_of(params, temperature=1.0, position=position)
        expected = choose(logits, inputs, state_of(params, [1, 2], output))
        token, state = jit_sample(jnp.asarray(logits), inputs, state)
        assert token.tolist() == expected.tolist()
        output += token.tolist()
    np.testing.assert_array_equal(state.output_counts[1], np.bincount(output, minlength=VOCAB_SIZE))
    assert not state.output_counts[0].any()


def test_only_rows_in_use_count_and_counts_do_not_overflow():
    state = state_of(SamplingParams(), [], [4] * 32766)
    logits = jax.nn.one_hot(jnp.full(3, 4), VOCAB_SIZE)
    for _ in range(3):
        inputs = make_inputs(3, slot=[1, 0, 2], uses_row=[1, 0, 0])
        _, state = jit_sample(logits, inputs, state)
    assert state.output_counts[1, 4] == 32767
    assert not state.output_counts[0].any()


def test_rows_not_in_use_are_not_touched():
    params = SamplingParams(allowed_token_ids=[5])
    state = state_of(params, [])
    logits = np.random.default_rng(0).normal(size=(3, VOCAB_SIZE)).astype(np.float32)
    tokens = choose(logits, make_inputs(3, slot=[1, 1, 0], uses_row=[1, 0, 1]), state)
    assert tokens.tolist() == [5, *logits.argmax(-1)[1:]]


def test_set_bias_leaves_the_counts():
    params = SamplingParams(min_tokens=2, frequency_penalty=1.0)
    state = state_of(params, [1], [9], banned_ids=[0])
    state = set_bias(state, 1, build_rows(params, VOCAB_SIZE, [], [])[2])
    assert state.output_counts[1, 9] == 1 and state.prompt_mask[1, 1] and not state.bias.any()


def test_bias_limits_the_choice():
    """H10: +100 picks the token; forbidden ids are never drawn, allowed ones are."""
    logits = np.random.default_rng(0).normal(size=VOCAB_SIZE).astype(np.float32) * 10
    params = SamplingParams(logit_bias={11: 100.0})
    assert choose(logits, inputs_of(params), state_of(params, [])).tolist() == [11]
    params = SamplingParams(allowed_token_ids=[4, 8, 15])
    inputs = inputs_of(params, 300, temperature=30.0, position=range(300))
    assert set(choose(logits, inputs, state_of(params, [])).tolist()) == {4, 8, 15}
    banned = set(range(VOCAB_SIZE)) - {2, 3}
    tokens = choose(logits, inputs, state_of(SamplingParams(), [], banned_ids=banned))
    assert set(tokens.tolist()) == {2, 3}
