"""Shared by the conversion's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from convert.packaged import packaged_smollm2
from jaxserve.errors import ModelNotFoundError

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged SmolLM2 GGUF; skips where `python -m convert.packaged` has not been run."""
    try:
        return packaged_smollm2()
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def llama_cpp_ids() -> dict[str, Any]:
    return json.loads((DATA / "llama_cpp_ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return json.loads((DATA / "texts.json").read_text(encoding="utf-8"))
