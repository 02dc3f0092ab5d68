"""Bar 2 of the engine's issue, small and whole."""

import pytest

from convert.packaged import packaged_smollm2
from jaxserve.errors import ModelNotFoundError
from tests.real.parity import run


@pytest.fixture(autouse=True)
def _packaged():
    try:
        packaged_smollm2()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def test_a_few_prompts_equal_transformers():
    """With few buckets, to compile little."""
    parity = run(6, 12, longest=60, generates=True, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=16)
    assert parity.ok and parity.num_equal + parity.num_tied == 6


@pytest.mark.slow
def test_64_prompts_equal_transformers():
    parity = run(64, 64)
    assert parity.ok and parity.num_equal + parity.num_tied == 64
