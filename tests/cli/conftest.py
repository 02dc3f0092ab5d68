"""Runs commands in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jaxserve.cli import app

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def run(*arguments: object, stdin: str = "") -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)

    return run


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> list[str]:
    """Options that select a small engine for the tiny model."""
    return ["--model", str(tiny_folder), "--max-model-len", "128", "--max-num-seqs", "4",
            "--max-num-batched-tokens", "32", "--block-size", "4", "--kv-cache-memory-bytes", str(1 << 18)]
