"""Prompts that are computed together do not see each other, and keep their order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.attention import DenseBatch, HeadTransform
from jaxserve.runner.buckets import Buckets
from jaxserve.runner.embedder import MAX_PROMPTS, QUERY_ROWS, Embedder, _PackedBatch, vectors

LENGTHS = (3, 70, 1, 40, 78)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("num_rows", [3 * QUERY_ROWS, QUERY_ROWS, 33])
def test_attends_as_the_dense_batch(num_rows: int, window: int | None) -> None:
    """In one go and in several."""
    positions = jnp.concatenate([jnp.arange(length) for length in LENGTHS])[:num_rows]
    prompts = jnp.repeat(jnp.arange(len(LENGTHS)), jnp.array(LENGTHS))[:num_rows]
    qkv = jax.random.normal(jax.random.key(0), (num_rows, 2, 5, 8))
    angles = positions[:, None] * jnp.array([1.0, 0.3, 0.1, 0.03])
    heads = HeadTransform(jnp.cos(angles), jnp.sin(angles))
    found, expected = (
        jax.jit(lambda qkv, batch=batch: batch.attend(qkv, heads, None, None, scale=0.4, window=window)[0])(qkv)
        for batch in (_PackedBatch(positions, prompts), DenseBatch(positions, prompts)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def embedder(**options: int) -> Embedder:
    given: Any = SimpleNamespace(config=SimpleNamespace(**options), buckets=Buckets(
        max_num_seqs=4, max_num_batched_tokens=options["max_num_batched_tokens"], query_tile=16))
    return Embedder(given)


@pytest.mark.parametrize("lengths", [[64], [1] * 70, [40, 24, 1], [40, 25, 64, 1, 1, 62], [63, 2, 63, 2], []])
def test_batches_have_all_prompts_in_order_and_fit(lengths: list[int]) -> None:
    maker = embedder(max_model_len=128, max_num_batched_tokens=64)
    assert maker.max_tokens == 64 and embedder(max_model_len=64, max_num_batched_tokens=128).max_tokens == 64
    prompts = [[index] * length for index, length in enumerate(lengths)]
    batches = maker.batches(prompts)
    assert [prompt for batch in batches for prompt in batch] == prompts
    for batch, after in zip(batches, [*batches[1:], None], strict=False):
        total = sum(map(len, batch))
        assert total <= maker._num_rows(batch) <= 64 and 0 < len(batch) <= MAX_PROMPTS
        assert after is None or len(batch) == MAX_PROMPTS or total + len(after[0]) > 64, "it would have fitted"


@pytest.mark.parametrize(("largest", "total", "num_rows"), [
    (300, 1, 16), (300, 17, 32), (300, 256, 256), (300, 257, 320), (48, 40, 48), (65, 65, 128)])
def test_rows_are_few_and_fill_their_tiles(largest: int, total: int, num_rows: int) -> None:
    assert embedder(max_model_len=512, max_num_batched_tokens=largest)._num_rows([[1] * total]) == num_rows


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_can_be_written_and_hold_nothing_else(normalize: bool) -> None:
    pooled = jnp.zeros((MAX_PROMPTS, 4)).at[0].set(jnp.array([3, 0, 4, 0]))
    first, zero = vectors(pooled, [[1], [2]], normalize=normalize)
    np.testing.assert_allclose(first, np.array([3, 0, 4, 0]) / (5 if normalize else 1), atol=1e-7)
    assert not zero.any() and first.flags.writeable
    assert first.base is not None and first.base.nbytes == 2 * first.nbytes
