"""An engine whose cache is too small for what it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import LLM
from tests.conftest import TINY_OPTIONS


@pytest.fixture(scope="session")
def cramped_llm(tiny_folder: Path) -> Iterator[LLM]:
    """`tiny_llm` with 33 blocks of 4 tokens, hardly more than one sequence needs: requests are preempted."""
    with LLM(str(tiny_folder), **(TINY_OPTIONS | dict(num_gpu_blocks_override=34))) as llm:
        yield llm
