"""Models that several folders of tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from tests.tiny import make_tiny_model, reference_model

# A runner in the background ignores Ctrl-C, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY_OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32, block_size=4,
                                    num_gpu_blocks_override=200)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama: 256 positions, ids 0-2 special, 2 ends a text."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_reference(tiny_folder: Path) -> Any:
    return reference_model(tiny_folder)


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder: Path) -> Iterator[LLM]:
    """One engine for tests that need nothing special: 4 sequences, steps of 32 tokens, blocks of 4, 128 positions."""
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        yield llm
