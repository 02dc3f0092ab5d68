"""Scopes of the source in the trace of compiled programs."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.trace import DEVICE_SCOPES, HOST_SCOPES, Operation, annotate, operations
from tests.cli.conftest import Run

PROGRAM = """\
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %tuple.1 = (s32[], /*index=1*/f32[8]{0}) tuple(%a, %b)
}
ENTRY %main {
  %dot.3 = f32[8,576]{1,0} dot(%a, %b), lhs_contracting_dims={1}, metadata={op_name="jit(step)/mlp/dot_general" x=1}
  while.2 = (s32[], f32[8]{0}) while(%tuple), body=%body, metadata={op_name="jit(step)/attention/while"}
  %fusion.9 = f32[8]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(step)/sample/logits/add"}
}
"""


def test_operations_of_a_program() -> None:
    found = operations(PROGRAM)
    assert found["dot.3"] == Operation("dot", "jit(step)/mlp/dot_general") and found["dot.3"].scope == "mlp"
    assert found["while.2"].opcode == "while" and found["while.2"].scope == "attention"
    assert found["fusion.9"].scope == "logits"  # the innermost
    assert found["tuple.1"] == Operation("tuple", "") and found["tuple.1"].scope == "other"


def read(file: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_annotate(tmp_path: Path) -> None:
    def device(name: str, microseconds: int, run: str = "1") -> dict[str, Any]:
        return {"ph": "X", "name": name, "dur": microseconds, "ts": 0,
                "args": {"hlo_op": name, "hlo_module": "m", "run_id": run}}

    thread = {"ph": "M", "name": "thread_name", "args": {"name": "python"}}
    host = {"ph": "X", "name": "schedule", "dur": 7, "ts": 0}
    events = [thread, host, device("dot.3", 5), device("while.2", 100), device("fusion.9", 3), device("dot.3", 2, "2"),
              device("dot.3", 4, "3"), device("unknown.1", 1, "3"), {"ph": "X", "name": "noise", "dur": 1}]
    (tmp_path / "in.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    times = annotate(tmp_path / "in.gz", ["%add.1 = f32[] add(%a)", PROGRAM], tmp_path / "out.gz")
    seconds = {"schedule": 7e-6, "mlp": 7e-6, "logits": 3e-6, "other": 5e-6}  # a loop's time is that of its body
    assert times == pytest.approx(dict.fromkeys((*HOST_SCOPES, *DEVICE_SCOPES), 0.0) | seconds)
    names = [event["name"] for event in read(tmp_path / "out.gz")]
    assert sorted(names) == sorted(["thread_name", "schedule", "mlp: dot.3", "attention: while.2", "logits: fusion.9",
                                    "mlp: dot.3", "other: dot.3", "other: unknown.1"])


def test_profile_of_a_tiny_model(run: Run, tiny: list[str], tmp_path: Path) -> None:
    result = run("profile", *tiny, "--steps", "4", "--batch", "2", "--prompt-tokens", "6", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "2 sequences, 4 steps" in result.stdout and str(tmp_path / "steps.trace.json.gz") in result.stdout
    found = Counter(event["name"].split(":")[0] for event in read(tmp_path / "steps.trace.json.gz"))
    assert all(found[scope] for scope in ("schedule", "step", "embed", "attention", "mlp", "sample")), found
    assert found["schedule"] >= 4 and found["step"] >= 4
    [recorded] = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    content = recorded.read_bytes()
    assert all(f"/{scope}/".encode() in content for scope in ("embed", "attention", "mlp", "sample"))


@pytest.mark.parametrize(("batch", "prompt_tokens", "steps", "allowed"), [
    (5, 4, 4, "at most 4"), (2, 20, 4, "a step of 32 tokens"), (1, 32, 200, "at most 96")])
def test_what_cannot_be_traced(run: Run, tiny: list[str], tmp_path: Path, batch: int, prompt_tokens: int, steps: int,
                               allowed: str) -> None:
    result = run("profile", *tiny, "--out", tmp_path, "--batch", batch, "--prompt-tokens", prompt_tokens,
                 "--steps", steps)
    assert result.exit_code == 2 and allowed in result.stderr and not list(tmp_path.iterdir())
