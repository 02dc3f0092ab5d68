"""A folder of executables for the tiny model, made once; tests that change one work on a copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve.executables.build import build_executables
from jaxserve.executables.job import make_job

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, block_size=4,
                               num_gpu_blocks_override=33)
PROGRAMS = ["decode-1", "decode-2", "lone-16", "mixed-16"]


@pytest.fixture(scope="session")
def compiled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executables")
    build_executables(make_job(tiny_folder, target="cpu", **OPTIONS), folder)
    return folder


@pytest.fixture
def copied(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "copy"))
