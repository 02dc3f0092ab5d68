"""Greedy choice, draws, and independence from the rest of the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxserve.sampling import noise
from jaxserve.sampling.state import init_state
from jaxserve.sampling.top import argmax, top_k
from tests.sampling.helpers import choose, jit_sample, make_inputs


@pytest.mark.parametrize("vocab_size", [1, 7, 5000])
def test_argmax_takes_the_first_of_equals(vocab_size):
    rng = np.random.default_rng(0)
    values = rng.integers(-3, 3, (20, vocab_size)).astype(np.float32)
    values[0], values[1, ::2] = -np.inf, -np.inf
    np.testing.assert_array_equal(argmax(jnp.asarray(values)), values.argmax(-1))


@pytest.mark.parametrize(("k", "vocab_size"), [(20, 33), (20, 4000), (64, 20011), (5, 6400)])
def test_top_k_is_lax_top_k(k, vocab_size):
    rng = np.random.default_rng(0)
    for drawn in (rng.normal(size=(3, vocab_size)), rng.integers(0, 4, (3, vocab_size))):
        values = jnp.asarray(drawn, jnp.float32).at[0, 30:].set(-jnp.inf)
        for ours, theirs in zip(jax.jit(top_k, static_argnums=1)(values, k), jax.lax.top_k(values, k), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def draw_many(logits, num_draws, **values) -> np.ndarray:
    """Tokens [num_draws] of one request: one position per draw."""
    return choose(logits, make_inputs(num_draws, position=np.arange(num_draws), temperature=1.0, **values))


@pytest.mark.parametrize("seed", [0, 1, 42, -7, 2**40 + 5])
def test_draws_follow_the_softmax(seed):
    logits = np.log([0.5, 0.2, 0.12, 0.1, 0.05, 0.02, 0.008, 0.002])
    tokens = draw_many(logits, 20000, seed=seed)
    assert stats.chisquare(np.bincount(tokens, minlength=8), np.exp(logits) * 20000).pvalue > 1e-3
    pairs = np.histogram2d(tokens[:-1:2].clip(max=3), tokens[1::2].clip(max=3), bins=4)[0]
    assert stats.chi2_contingency(pairs).pvalue > 1e-3, "successive positions are independent"


def test_draws_over_seeds_follow_the_softmax_of_temperature_and_limits():
    logits = np.array([2.0, 1.5, 1.0, 0.0, -1.0, 1.2, -np.inf, -np.inf])
    inputs = make_inputs(20000, seed=np.arange(20000), position=3, temperature=0.7, top_k=5, top_p=0.95)
    probs = np.exp(logits / 0.7)
    probs[3:5] = 0  # the least likely one by top-k, the next by top-p
    counts = np.bincount(choose(logits, inputs), minlength=8)
    assert (counts[probs == 0] == 0).all()
    live = probs > 0
    assert stats.chisquare(counts[live], probs[live] / probs.sum() * 20000).pvalue > 1e-3


def test_uniform_draws_over_a_large_vocabulary():
    tokens = draw_many(np.zeros(1024), 4096, seed=5)
    assert stats.chisquare(np.bincount(tokens, minlength=1024).reshape(32, 32).sum(1)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(tokens, minlength=1024).reshape(32, 32).sum(0)).pvalue > 1e-3


def test_exponential_variables_are_exponential():
    keys = noise.position_keys(jnp.arange(50), jnp.zeros(50, jnp.int32), jnp.arange(50))
    values = np.asarray(noise.exponential(keys, 4000), np.float64)
    assert (values > 0).all()
    assert stats.kstest(values.ravel(), "expon").pvalue > 1e-3
    assert np.abs(np.corrcoef(values) - np.eye(50)).max() < 0.08, "rows are independent"


def test_keys_are_jax_keys():
    key = jax.random.fold_in(jax.random.key(1234), 17)
    ours = noise.position_keys(jnp.array([1234]), jnp.array([0]), jnp.array([17]))[0]
    np.testing.assert_array_equal(ours, jax.random.key_data(key))


def test_seeded_request_is_independent_of_the_batch():
    """H04."""
    num_steps, vocab_size = 16, 9000
    rng = np.random.default_rng(1)
    logits_a = rng.normal(size=(num_steps, vocab_size)).astype(np.float32) * 2
    limits = {"temperature": 0.8, "top_p": 0.9}
    state = init_state(8, vocab_size)

    def tokens_of_a(num_rows: int, row: int, slot: int, others: dict) -> list[int]:
        tokens = []
        for position in range(num_steps):
            logits = np.random.default_rng(row + num_rows).normal(size=(num_rows, vocab_size)).astype(np.float32)
            logits[row] = logits_a[position]
            columns = {name: np.full(num_rows, value) for name, value in others.items()}
            mine = {"seed": 42, "position": position, "slot": slot, **limits}
            for name, value in mine.items():
                column = columns.setdefault(name, np.full(num_rows, 3 if name == "seed" else value))
                column[row] = value
            for name in set(columns) - set(mine):
                columns[name][row] = 0
            tokens.append(int(choose(logits, make_inputs(num_rows, **columns), state)[row]))
        return tokens

    alone = tokens_of_a(1, 0, 0, {})
    assert len(set(alone)) > 8
    flat_neighbour = {"temperature": 3.0, "top_p": 0.99}
    for num_rows, row, slot, others in [
        (2, 0, 5, {"temperature": 0.0}), (2, 1, 0, flat_neighbour), (8, 5, 7, flat_neighbour),
        (8, 7, 7, {"temperature": 1.0, "top_k": 500}), (8, 2, 3, {"uses_row": 1, "temperature": 1.0}),
    ]:  # fmt: skip
        assert tokens_of_a(num_rows, row, slot, others) == alone


def test_rounding_rarely_changes_a_draw():
    logits = np.random.default_rng(0).normal(size=(2000, 500)).astype(np.float32)
    noisy = logits + np.random.default_rng(1).uniform(-1e-5, 1e-5, logits.shape).astype(np.float32)
    inputs = make_inputs(2000, position=np.arange(2000), temperature=1.0, top_p=0.95)
    assert (choose(logits, inputs) != choose(noisy, inputs)).sum() <= 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.1}])
def test_tiny_temperatures_are_greedy(dtype, limits):
    """H11."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(8, 9000)) * 5, dtype).astype(jnp.float32)
    top = logits.argmax(-1)
    logits = logits.at[jnp.arange(8), top].add(1.0)
    for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 0.0):
        for scale in (1.0, 1e3):
            inputs = make_inputs(8, temperature=temperature, position=range(8), **limits)
            np.testing.assert_array_equal(choose(logits * scale, inputs), top)


def test_greedy_rows_in_a_mixed_batch():
    logits = np.random.default_rng(0).integers(0, 5, (8, 9000)).astype(np.float32)  # ties: the first one wins
    inputs = make_inputs(8, temperature=[0, 1, 0, 2, 1e-6, 0, 1, 1], top_k=[5, 5, 0, 0, 3, 0, 1, 0], slot=1)
    np.testing.assert_array_equal(choose(logits, inputs)[[0, 2, 4, 5]], logits.argmax(-1)[[0, 2, 4, 5]])


def test_top_k_1_is_greedy():
    logits = np.random.default_rng(0).normal(size=(8, 9000)).astype(np.float32)
    tokens = choose(logits, make_inputs(8, temperature=5.0, top_k=1, position=range(8)))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_hopeless_logits_give_a_token_of_the_vocabulary(poison, temperature):
    tokens = choose(np.full((8, 9000), poison), make_inputs(8, temperature=temperature, top_p=0.9))
    assert ((tokens >= 0) & (tokens < 9000)).all()


def test_one_program_for_every_mixture():
    logits, state = jnp.ones((3, 77)), init_state(3, 77)
    run: Any = jit_sample
    before = run._cache_size()
    for values in ({}, {"temperature": 1.0}, {"temperature": [0, 1, 2], "top_p": 0.5}, {"uses_row": 1, "top_k": 9}):
        _, state = jit_sample(logits, make_inputs(3, **values), state)
    assert run._cache_size() == before + 1
