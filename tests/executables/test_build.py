"""Compiling ahead: what is written, what is kept when it is taken up again, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ExecutablesError, InvalidInputError
from jaxserve.executables.build import build_executables
from jaxserve.executables.job import make_job
from jaxserve.executables.manifest import MANIFEST, read_manifest, sha256_of
from tests.cli.conftest import run as run  # the fixture
from tests.executables.conftest import OPTIONS, PROGRAMS


def build(folder: Path, model: Path, **options: Any) -> list[str]:
    """The programs that were compiled now."""
    done: list[str] = []
    build_executables(make_job(model, target="cpu", **(OPTIONS | options)), folder,
                      on_done=lambda name, entry: done.append(name))
    return sorted(done)


def test_the_manifest_names_every_program(compiled: Path) -> None:
    manifest = read_manifest(compiled)
    assert sorted(manifest.programs) == sorted(manifest.fingerprint["buckets"]) == PROGRAMS
    for name, entry in manifest.programs.items():
        content = (compiled / f"{name}.executable").read_bytes()
        assert (entry.num_bytes, entry.sha256) == (len(content), sha256_of(content))
        assert entry.temp_bytes > 0 and entry.compile_s > 0
    assert sorted(file.name for file in compiled.iterdir()) == sorted(
        [MANIFEST, *(f"{name}.executable" for name in PROGRAMS)])


def test_only_what_is_missing_or_damaged_is_compiled_again(copied: Path, tiny_folder: Path) -> None:
    assert build(copied, tiny_folder) == []
    (copied / "decode-2.executable").unlink()
    file = copied / "mixed-16.executable"
    file.write_bytes(file.read_bytes()[:100])
    assert build(copied, tiny_folder) == ["decode-2", "mixed-16"]
    assert sorted(read_manifest(copied).programs) == PROGRAMS


def test_other_sources_compile_all_of_it_again(copied: Path, tiny_folder: Path, caplog) -> None:
    for name in ("decode-2.99999", "decode-4.executable"):  # of a process that was killed, and of another time
        (copied / name).touch()
    manifest = json.loads((copied / MANIFEST).read_text())
    manifest["fingerprint"]["sources"]["jaxserve/runner/step.py"] = "another"
    (copied / MANIFEST).write_text(json.dumps(manifest))
    assert build(copied, tiny_folder) == PROGRAMS
    assert "made anew: changed since: jaxserve/runner/step.py" in caplog.text
    assert sorted(file.name for file in copied.iterdir()) == sorted(
        [MANIFEST, *(f"{name}.executable" for name in PROGRAMS)])


def test_programs_of_other_options_are_not_written_over(copied: Path, tiny_folder: Path) -> None:
    """A slip in an option must not cost what is there."""
    before = {file: file.read_bytes() for file in copied.iterdir()}
    with pytest.raises(ExecutablesError, match=r"something else .*max_model_len is 64 there, 32 here; max_num_seqs is"):
        build(copied, tiny_folder, max_model_len=32, max_num_seqs=1)
    assert {file: file.read_bytes() for file in copied.iterdir()} == before


def test_programs_of_another_model_are_not_written_over(copied: Path, tiny_folder: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = (copied / MANIFEST).read_text()
    with pytest.raises(ExecutablesError, match=r"holds programs for something else.*rms_norm_eps is"):
        build(copied, tmp_path)
    assert (copied / MANIFEST).read_text() == before


def test_a_folder_that_cannot_be_written_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(ExecutablesError, match=re.escape(f"out='{folder}'")):
            build(folder, tiny_folder)


def test_a_stopped_compile_keeps_what_it_has(copied: Path, tiny_folder: Path) -> None:
    """The manifest is written after each program."""
    (copied / "decode-1.executable").unlink()
    (copied / "decode-2.executable").unlink()
    seen: list[list[str]] = []

    def stop(name: str, entry: object) -> None:
        seen.append(sorted(read_manifest(copied).programs))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_executables(make_job(tiny_folder, target="cpu", **OPTIONS), copied, on_done=stop)
    assert len(seen) == 1 and len(seen[0]) == 3 and {"lone-16", "mixed-16"} < set(seen[0])
    assert len(build(copied, tiny_folder)) == 1


def test_nothing_else_is_written_over(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ExecutablesError, match="new, empty, or a folder that jaxserve compile wrote"):
        build(tmp_path, tiny_folder)
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(("options", "message"), [
    (dict(target="h300"), "target='h300'.*h200.*cpu or local"),
    (dict(target="cpu", autotune_results=Path("x")), "autotune_results='x'.*only for GPUs"),
    (dict(target="h200", autotune_results=Path("x")), "autotune_results='x'.*a file that XLA wrote"),
    (dict(target="h200", save_autotune_results=Path("x")), "save_autotune_results='x'.*target=local"),
    (dict(target="cpu", tensor_parallel_size=3), "tensor_parallel_size=3"),
])
def test_bad_options(options: dict[str, Any], message: str, tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_job(tiny_folder, **options)


def test_autotuned_gemms_may_be_tritons_others_not(tiny_folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.touch()
    job = make_job(tiny_folder, target="h200", num_gpu_blocks_override=9, autotune_results=results)
    assert dict(job.compiler_options) == {
        "xla_gpu_enable_triton_gemm": True, "xla_gpu_load_autotune_results_from": str(results),
        "xla_gpu_require_complete_aot_autotune_results": True}
    assert make_job(tiny_folder, target="h200", num_gpu_blocks_override=9).compiler_options == ()


def test_the_command_says_what_it_made(run: Callable[..., Any], tiny_folder: Path, tmp_path: Path) -> None:
    result = run("compile", tiny_folder, "--target", "h200", "--out", tmp_path / "h200", "--max-model-len", 64,
                 "--max-num-seqs", 2, "--max-num-batched-tokens", 16, "--kv-cache-memory-bytes", 100_000)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 programs for h200, ")
    manifest = json.loads((tmp_path / "h200" / MANIFEST).read_text())
    assert manifest["fingerprint"]["target"] == {
        "platform": "gpu", "device": "NVIDIA H200", "compute_capability": [9, 0], "multiprocessors": 132}
    assert sorted(manifest["programs"]) == ["decode-8", "mixed-16"]
