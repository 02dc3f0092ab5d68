"""The rows made on the host."""

import subprocess
import sys

import numpy as np
import pytest

from jaxserve.request import SamplingParams
from jaxserve.sampling.rows import banned_ids, build_bias, build_rows, needs_row, seed_words


def test_imports_no_jax():
    code = "import sys, jaxserve.sampling.rows; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False), ({"temperature": 0.5, "top_k": 3, "top_p": 0.1, "min_p": 0.1, "seed": 1}, False),
        ({"logit_bias": {}}, False), ({"logit_bias": {1: 2}}, True), ({"allowed_token_ids": [1]}, True),
        ({"bad_words": ["x"]}, True), ({"min_tokens": 2}, True), ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True), ({"repetition_penalty": 1.1}, True),
    ],
)  # fmt: skip
def test_needs_row(params, expected):
    assert needs_row(SamplingParams(**params)) is expected


def test_rows():
    mask, counts, bias = build_rows(SamplingParams(logit_bias={4: 1.5}), 6, [1, 1, 5], [2, 2, 3], [0])
    assert (mask.dtype, counts.dtype, bias.dtype) == (np.bool_, np.int16, np.float32)
    assert mask.tolist() == [False, True, False, False, False, True]
    assert counts.tolist() == [0, 0, 2, 1, 0, 0]
    assert bias.tolist() == [-np.inf, 0, 0, 0, 1.5, 0]
    assert not any(row.any() for row in build_rows(SamplingParams(), 6, [], []))


def test_bias_on_an_allowed_token_stays():
    bias = build_bias(SamplingParams(allowed_token_ids=[1, 2], logit_bias={2: 3, 3: 50}), 5, [1])
    assert bias.tolist() == [-np.inf, -np.inf, 3, -np.inf, -np.inf]


def test_ends_are_banned_until_min_tokens():
    params = SamplingParams(min_tokens=3)
    assert banned_ids(params, [5, 6], 2, {0, 9}) == {0, 9}
    assert banned_ids(params, [5, 6], 3, {0, 9}) == set()  # one in flight


def test_bad_words_ban_their_last_token():
    words = [[7], [1, 2], [3, 1, 4]]
    params = SamplingParams(bad_words=["x"])
    assert banned_ids(params, [], 0, {0}, words) == {7}
    assert banned_ids(params, [3, 1], 2, {0}, words) == {7, 2, 4}
    assert banned_ids(params, [1, 3], 2, {0}, words) == {7}


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 7, 2**63 - 1, -1, -(2**63) + 1])
def test_seed_words_keep_all_bits(seed):
    low, high = (int(word) & 0xFFFFFFFF for word in seed_words(seed))
    assert (high << 32 | low) == seed & (2**64 - 1)
