"""Log-probabilities, ranks and alternatives, against torch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling.logprobs import logprobs, prompt_logprobs


def check(got, logits, token_ids):
    chosen, rank, top_ids, top_values = (np.asarray(array) for array in got)
    expected = torch.log_softmax(torch.tensor(np.asarray(logits), dtype=torch.float64), -1)
    of_token = expected.gather(-1, torch.tensor(np.asarray(token_ids), dtype=torch.int64)[:, None])
    np.testing.assert_allclose(chosen, of_token[:, 0].numpy(), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(rank, 1 + (expected > of_token).sum(-1).numpy())
    top = expected.topk(MAX_LOGPROBS)
    np.testing.assert_allclose(top_values, top.values.numpy(), atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(top_ids, top.indices.numpy())


@pytest.mark.parametrize("vocab_size", [20, 100, 20011])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_logprobs_equal_torchs(vocab_size, scale):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, vocab_size)).astype(np.float32) * scale
    token_ids = rng.integers(0, vocab_size, 5)
    token_ids[0] = logits[0].argmax()
    got = jax.jit(logprobs)(jnp.asarray(logits), jnp.asarray(token_ids), jnp.array([0, 0, 1, 0, 0]))
    check(got, logits, token_ids)
    assert got[1][0] == 1
    assert [array.dtype for array in got] == [jnp.float32, jnp.int32, jnp.int32, jnp.float32]


def test_nobody_asks():
    assert not any(np.asarray(array).any() for array in logprobs(jnp.ones((2, 30)), jnp.zeros(2, int), jnp.zeros(2)))


@pytest.mark.parametrize(("num_tokens", "chunk"), [(16, 64), (150, 64)])
def test_prompt_logprobs_in_chunks(num_tokens, chunk):
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.normal(size=(size, 8)), jnp.float32) for size in (num_tokens, 300))
    target_ids = jnp.asarray(rng.integers(0, 300, num_tokens))
    run: Any = jax.jit(lambda n: prompt_logprobs(hidden, lambda rows: rows @ weight.T, target_ids, n, chunk))
    for num_rows in (num_tokens, num_tokens // 2 + 1, 1, 0):
        got = run(jnp.int32(num_rows))
        done = -(-num_rows // chunk) * chunk
        check([array[:num_rows] for array in got], (hidden @ weight.T)[:num_rows], target_ids[:num_rows])
        assert not got[1][done:].any() or done + chunk > num_tokens, "chunks nobody needs are not computed"
    assert run._cache_size() == 1


def test_prompt_logprobs_never_hold_all_logits():
    """H18."""
    hidden, weight, targets = jnp.ones((512, 8)), jnp.ones((1000, 8)), jnp.zeros(512, jnp.int32)
    run: Any = jax.jit(lambda n: prompt_logprobs(hidden, lambda rows: rows @ weight.T, targets, n))
    assert "[512,1000]" not in run.lower(jnp.int32(3)).compile().as_text()
