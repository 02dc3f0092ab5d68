"""Which tokens min-p, top-k and top-p leave, against transformers' warpers and against their definitions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxserve.sampling.truncation import cutoffs
from tests.sampling.helpers import make_inputs


@jax.jit
def _kept(logits, inputs):
    below = (logits.max(-1, keepdims=True) - logits) / inputs.temperature[:, None]
    return below <= cutoffs(below, inputs, inputs.temperature > 0)[:, None]


def kept(logits: np.ndarray, **values) -> np.ndarray:
    inputs = make_inputs(len(logits), **({"temperature": 1.0} | values))
    return np.asarray(_kept(jnp.asarray(logits, jnp.float32), inputs))


def reference(logits: np.ndarray, top_k=0, top_p=1.0, min_p=0.0, temperature=1.0) -> np.ndarray:
    scores = torch.tensor(logits, dtype=torch.float32) / temperature
    warpers = [MinPLogitsWarper(min_p)] if min_p else []
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        scores = warper(None, scores)
    return torch.isfinite(scores).numpy()


@pytest.mark.parametrize("scale", [0.3, 3.0])  # flat rows need the search, peaked ones only the candidates
@pytest.mark.parametrize("vocab_size", [50, 20011])
@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 64}, {"top_k": 65}, {"top_k": 700}, {"top_k": 10**6},
        {"top_p": 0.01}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"min_p": 0.02}, {"min_p": 0.7},
        {"top_k": 40, "top_p": 0.8}, {"top_k": 300, "top_p": 0.95}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 500, "top_p": 0.9, "min_p": 0.1}, {"top_p": 0.7, "min_p": 0.01, "temperature": 1.7},
    ],
)  # fmt: skip
def test_keeps_what_transformers_keeps(limits, vocab_size, scale):
    logits = np.random.default_rng(vocab_size).normal(size=(4, vocab_size)).astype(np.float32) * scale
    np.testing.assert_array_equal(kept(logits, **limits), reference(logits, **limits))


def test_rows_have_their_own_limits():
    logits = np.random.default_rng(0).normal(size=(4, 20011)).astype(np.float32)
    limits: list[dict[str, Any]] = [{"top_k": 3}, {"top_k": 900}, {"top_p": 0.95}, {"top_k": 100, "min_p": 0.3}]
    columns = {n: [row.get(n, d) for row in limits] for n, d in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    together = kept(logits, **columns)
    for i, row in enumerate(limits):
        np.testing.assert_array_equal(together[i], reference(logits[i : i + 1], **row)[0])


def test_ties_at_the_limit_are_kept():
    logits = np.zeros((1, 10000), np.float32)
    logits[0, [5, 77]] = 2.0, 1.0
    assert kept(logits, top_k=2).sum() == 2
    assert kept(logits, top_k=3).all() and kept(logits, top_k=200).all()
    assert kept(np.ones((1, 10000), np.float32), top_p=0.1, min_p=1.0).all()


def test_top_p_keeps_at_least_one():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    np.testing.assert_array_equal(kept(logits, top_p=1e-9), logits == logits.max(-1, keepdims=True))


def test_forbidden_tokens_are_never_kept_unless_nothing_else_limits():
    logits = np.full((1, 10000), -np.inf, np.float32)
    logits[0, :3] = 1.0, 0.5, 0.2
    assert kept(logits, top_p=0.999)[0].nonzero()[0].tolist() == [0, 1, 2]
    assert kept(logits, top_k=2)[0].nonzero()[0].tolist() == [0, 1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 30), top_k=st.integers(0, 600),
    top_p=st.floats(0.001, 1), step=st.sampled_from([0.0, 0.125, 1.0]),
)  # fmt: skip
def test_smallest_set_that_reaches_p(seed, scale, top_k, top_p, step):
    logits = (np.random.default_rng(seed).normal(size=(1, 500)) * scale).astype(np.float32)
    if step:  # many ties, as from a model in bfloat16
        logits = np.round(logits / step) * step
    mask, values = kept(logits, top_k=top_k, top_p=top_p)[0], logits[0].astype(np.float64)
    least = values[mask].min()
    assert mask[values.argmax()] and (mask == (values >= least)).all(), "an upper set with whole ties"
    if 0 < top_k < 500:
        kth = np.sort(values)[-top_k]
        assert least >= kth
        values = np.where(values >= kth, values, -np.inf)
    probs = np.exp(values - values.max())
    probs /= probs.sum()
    assert probs[mask].sum() >= top_p - 1e-5
    assert probs[values > least].sum() < top_p + 1e-5
