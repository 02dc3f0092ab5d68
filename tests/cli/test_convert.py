"""`jaxserve convert`; what is converted is tested in tests/convert."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_converted_model_says_the_same(run: Run, tiny: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    converted = run("convert", tiny_folder, tmp_path / "new")
    assert converted.exit_code == 0, converted.output
    assert f"wrote {tmp_path / 'new'} (" in converted.stderr
    texts = [run("generate", "fox", *tiny, "--model", model, "--temperature", "0", "--max-tokens", "6").stdout
             for model in (tiny_folder, tmp_path / "new")]
    assert texts[0] and texts[0] == texts[1]


def test_nothing_is_overwritten(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    result = run("convert", tiny_folder, tmp_path)
    assert result.exit_code == 2 and "a new or empty folder" in result.stderr


def test_dtype_is_checked(run: Run, tiny_folder: Path, tmp_path: Path) -> None:
    result = run("convert", tiny_folder, tmp_path / "new", "--dtype", "int3")
    assert result.exit_code == 2 and "dtype='int3'" in result.stderr
