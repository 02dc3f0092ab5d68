"""The prompts are what they are said to be."""

import pytest

from bench import report, workload
from jaxserve.text import Tokenizer
from tests.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def test_lengths(tokenizer):
    work = workload.batch(tokenizer)
    lengths = [len(prompt) for prompt in work.prompts]
    assert (len(lengths), min(lengths), max(lengths)) == (32, 8, 512)
    assert work.num_prompt_tokens == 4022 and work.num_output_tokens == 32 * 64
    assert lengths != sorted(lengths)
    assert [len(prompt) for prompt in workload.single(tokenizer).prompts] == [128]


def test_always_the_same_and_all_different(tokenizer):
    work = workload.batch(tokenizer)
    assert work == workload.batch(tokenizer)
    assert len({tuple(prompt[:8]) for prompt in work.prompts}) > 16


def test_one_request(tokenizer):
    assert [len(prompt) for prompt in workload.batch(tokenizer, num_requests=1).prompts] == [8]


def test_agreement():
    assert report.agreement([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == {"equal_outputs": 1.0, "equal_tokens": 1.0}
    assert report.agreement([[1, 2], [1, 2]], [[1, 2], [3, 2]]) == {"equal_outputs": 0.5, "equal_tokens": 0.5}
