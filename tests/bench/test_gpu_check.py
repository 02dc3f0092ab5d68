"""The script for a GPU machine goes through on a CPU, and sees what is wrong."""

import json

import pytest

from bench import gpu_check
from bench.gpu import kernels


def test_dry_run(tmp_path, capsys):
    gpu_check.main(["--dry-run", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["dry_run"] and all(kernel["is_right"] for kernel in found["kernels"])
    assert {name.split()[0] for name in (kernel["name"] for kernel in found["kernels"])} == {
        "decode", "mixed", "rope_kv_write", "kv_write", "int4_matmul"}
    assert found["end_to_end"]["smollm2"]["answer"] and found["end_to_end"]["decode_steps"][0]["seconds"] > 0
    assert "end to end" in capsys.readouterr().out


def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="--dry-run"):
        gpu_check.main([])


def test_a_wrong_kernel_is_seen(monkeypatch):
    right = kernels.int4_matmul
    monkeypatch.setattr(kernels, "int4_matmul", lambda *args, backend: right(*args, backend=backend) * (
        1.02 if backend == "triton_interpret" else 1))
    wrong = [each for each in kernels.compare_all("triton_interpret", only_first=True) if not each.is_right]
    assert [each.name.split()[0] for each in wrong] == ["int4_matmul"]
