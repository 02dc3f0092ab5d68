"""Engines of one shape, so that their programs are compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from tests.conftest import TINY_OPTIONS

WIDE_OPTIONS: dict[str, Any] = TINY_OPTIONS | dict(max_model_len=256, max_num_seqs=16, num_gpu_blocks_override=600)


@pytest.fixture(scope="session")
def make_wide_llm(tiny_folder: Path) -> Callable[..., LLM]:
    """16 sequences of up to 256 tokens, steps of 32."""
    return lambda **options: LLM(str(tiny_folder), **(WIDE_OPTIONS | options))


@pytest.fixture(scope="session")
def wide_llm(make_wide_llm: Callable[..., LLM]) -> Iterator[LLM]:
    """Warmed up."""
    with make_wide_llm() as llm:
        llm.warmup()
        yield llm
