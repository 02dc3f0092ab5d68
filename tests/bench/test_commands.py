"""Every benchmark runs on a tiny model and writes valid JSON; what their numbers are is not looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bench import cold_start, host_overhead, kv_waste, latency, memory, server_overhead, structured_output, throughput

SMALL = ["--engine-option", "max_num_seqs=4", "--engine-option", "max_num_batched_tokens=16", "--num-new-tokens", "3"]


@pytest.fixture
def run(tiny_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a command on the tiny model; returns what it wrote."""
    def command(main: Callable[..., Any], *options: str) -> Any:
        file = tmp_path / "results.json"
        main(["--model", str(tiny_folder), "--json", str(file), *options])
        return json.loads(file.read_text())

    return command


def test_throughput(run):
    found = run(throughput.main, *SMALL, "--num-requests", "4", "--longest", "20", "--repeat", "2")
    assert found["engines"].keys() == {"jaxserve", "transformers-static", "transformers-cb"}
    for name, engine in found["engines"].items():
        assert engine["output_tokens_per_s"] > 0 and len(engine["rounds"]) == 2
        assert name == "jaxserve" or engine["agreement"] == {"equal_outputs": 1.0, "equal_tokens": 1.0}
        assert name == "jaxserve" or engine["jaxserve_ratio"] > 0


def test_latency(run):
    found = run(latency.main, *SMALL, "--prompt-tokens", "10", "--repeat", "1")
    assert found["engines"]["transformers"]["agreement"]["equal_tokens"] == 1.0
    for engine in found["engines"].values():
        assert engine["first_token_s"] > 0 and engine["decode_tokens_per_s"] > 0


def test_memory(run):
    found = run(memory.main, *SMALL, "--num-requests", "2", "--longest", "20")["bytes"]["jaxserve"]
    assert 0 < found["weights"] < found["peak"]
    assert found["other"] == found["peak"] - found["weights"] - found["kv_cache"]


def test_host_overhead(run):
    found = run(host_overhead.main, "--num-seqs", "3", "--steps", "5")["scenarios"]
    assert list(found) == list(host_overhead.SCENARIOS)
    for scenario in found.values():
        assert all(part["median"] >= 0 for part in scenario["cpu_ms"].values())


def test_kv_waste(run):
    found = run(kv_waste.main, "--num-requests", "20", "--num-seqs", "4", "--block-size", "4", "--num-blocks", "260")
    assert 0 < found["waste"] < 1 and found["blocks_held_at_end"] == 0
    assert found["finished"] + found["aborted"] == 20


def test_cold_start(run):
    found = run(cold_start.main, "--repeat", "1", "--max-tokens", "2", "--", "--max-model-len", "64")["runs"]
    for (start,) in found.values():
        assert start["first_token_s"] > start["imports_s"] > 0


def test_server_overhead(run):
    found = run(server_overhead.main, "--engine-option", "max_num_batched_tokens=16", "--streams", "4",
                "--max-tokens", "6", "--prompt-tokens", "4", "--repeat", "1")
    assert found["ratio"] > 0 and all(found["tokens_per_s"][name][0] > 0 for name in ("AsyncLLM", "HTTP"))


def test_structured_output(run):
    found = run(structured_output.main, "--engine-option", "max_num_batched_tokens=16", "--streams", "4",
                "--schemas", "2", "--seeds", "1", "--max-tokens", "3", "--repeat", "1")
    assert found["invalid"] == 0 and found["ratio"] > 0


def test_schemas_are_schemas_and_differ():
    schemas = [structured_output.nasty_schema(index) for index in range(100)]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert len({json.dumps(schema) for schema in schemas}) > 95
    assert len(json.dumps(schemas[80:])) > 1.5 * len(json.dumps(schemas[:20]))
