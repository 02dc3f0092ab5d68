"""What a plan is made from, what it says of a bad question, and what it remembers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import jaxserve
from jaxserve.errors import InvalidInputError, JaxserveError, ModelNotFoundError, UnsupportedModelError
from jaxserve.planning import known_models, measure, read_model
from jaxserve.planning.measure import StepBytes, shallow
from jaxserve.planning.planner import Plan, plan, plan_all, remedies

STEP = StepBytes(weights=16_060_000_000, read_weights=15_000_000_000, block=2_097_152, state=230_000_000,
                 temporaries=790_000_000, compile_s=1.0)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> list[measure.Request]:
    """Nothing is compiled; the requests come here."""
    seen: list[measure.Request] = []

    def answer(requests, *, on_done):
        seen.extend(requests)
        scale = [{None: 4, "int4": 1, "fp8": 2}[request.model.quantization and request.model.quantization.kind] / 4
                 / request.tensor_parallel_size for request in requests]
        kv = [(1 if request.config.kv_cache_dtype == "int8" else 2) / 2 / request.tensor_parallel_size
              for request in requests]
        return [replace(STEP, weights=int(STEP.weights * size), block=int(STEP.block * share))
                for size, share in zip(scale, kv, strict=True)]

    monkeypatch.setattr("jaxserve.planning.planner.measure_all", answer)
    return seen


def test_the_published_parameter_counts() -> None:
    """Of the well-known models, as their cards state them."""
    counts = {}
    for name in known_models():
        model = read_model(name)
        attention = model.hidden_size * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
        layer = attention + 3 * model.hidden_size * model.intermediate_size
        tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
        counts[name] = (model.num_layers * layer + tables) / 1e9
    stated = {"Llama-3.1-8B": 8.03, "Llama-3.1-70B": 70.55, "Llama-3.1-405B": 405.9, "Llama-2-7B": 6.74,
              "Qwen2.5-7B": 7.61, "Qwen2.5-72B": 72.7, "Qwen3-8B": 8.19, "Qwen3-32B": 32.76, "Mistral-7B": 7.25,
              "SmolLM2-135M": 0.1345}
    assert counts == pytest.approx(stated, rel=0.002)


def test_a_config_or_a_checkpoint_will_do(tmp_path: Path, tiny_folder: Path) -> None:
    config = known_models()["Qwen3-8B"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == read_model("qwen3-8B")
    assert read_model(tiny_folder).vocab_size < 1000


@pytest.mark.parametrize(("described", "kind", "group_size", "symmetric"), [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "int4", 128, True),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False}, "int4", None, False),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, "int4", 64, False),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
        "num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}}}}, "int4", 32, True),
    ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {
        "num_bits": 8, "type": "float", "symmetric": True}}}}, "fp8", 128, True),
    ({"quant_method": "fbgemm_fp8"}, "fp8", 128, True),
])
def test_a_quantised_checkpoint_says_so_itself(tmp_path, described, kind, group_size, symmetric) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()["Llama-3.1-8B"] | {
        "quantization_config": described}))
    found = read_model(tmp_path).quantization
    assert found is not None
    assert (found.kind, found.group_size, found.symmetric) == (kind, group_size, symmetric)


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_models()["Llama-3.1-8B"] | {
        "quantization_config": {"quant_method": "gptq", "bits": 8}}))
    with pytest.raises(UnsupportedModelError, match="gptq, 8 bits"):
        read_model(tmp_path)


@pytest.mark.parametrize(("options", "message"), [
    (dict(model="llama-9-8b"), "model='llama-9-8b'.*Llama-3.1-8B"),
    (dict(target="h300"), "target='h300'.*b200"),
    (dict(tensor_parallel_size=3), "tensor_parallel_size=3.*32 query heads"),
    (dict(tensor_parallel_size=12), "tensor_parallel_size=12.*from 1 to 8"),
    (dict(tensor_parallel_size=True), "tensor_parallel_size=True"),
    (dict(quantization="int3"), "quantization='int3'.*gptq, awq, int4, fp8"),
    (dict(kv_cache_dtype="int4"), "kv_cache_dtype='int4'.*int8"),
    (dict(max_model_len=200_000), "max_model_len=200000.*131072"),
    (dict(max_model_length=1), "max_model_length=1.*max_model_len"),
    (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization=1.5"),
])
def test_bad_questions(options, message) -> None:
    with pytest.raises((InvalidInputError, ModelNotFoundError), match=message):
        plan(**{"model": "llama-3.1-8b", "target": "h200", **options})


def test_remedies_are_computed_and_only_those_that_help_are_told(stubbed) -> None:
    short = plan("llama-3.1-8b", target="a10g")
    assert not short.fits
    found = {remedy.change: remedy.plan for remedy in remedies(short)}
    assert list(found) == [f"--max-model-len {short.longest_context}", "--quantization int4 --kv-cache-dtype int8",
                           "--tensor-parallel-size 2"]
    assert all(better.fits for better in found.values())
    asked = {(request.model.quantization and request.model.quantization.kind, request.config.kv_cache_dtype,
              request.tensor_parallel_size) for request in stubbed}
    assert {(None, "int8", 1), ("int4", "auto", 1), ("int4", "int8", 1), (None, "auto", 2)} < asked
    assert ("fp8", "auto", 1) not in asked  # the card has no fp8 arithmetic


def test_cards_are_ranked(stubbed) -> None:
    ranked = plan_all("llama-3.1-8b", max_model_len=32768)
    assert [entry.target.name for entry in ranked if isinstance(entry, Plan) and entry.fits][:2] == ["b200", "h200"]
    assert len(ranked) == 7
    fits = [isinstance(entry, Plan) and entry.fits for entry in ranked]
    assert fits == sorted(fits, reverse=True)


def test_json_is_json(stubbed) -> None:
    found = json.loads(json.dumps(plan("llama-3.1-8b", target="a10g").as_json()))
    assert found["fits"] is False and found["bytes_per_device"]["weights"] == STEP.weights
    assert found["batches"][0]["decode"][0]["batch"] == 1


def test_layers_take_turns_in_the_same_memory() -> None:
    """Two of each kind are compiled."""
    model = replace(read_model("mistral-7b"), num_layers=6, layer_windows=(None, 64, 64, 64, 64, None))
    assert shallow(model).layer_windows == (None, None, 64, 64)
    assert shallow(read_model("llama-3.1-8b")).num_layers == 2


def test_depth_does_not_change_the_temporaries(monkeypatch: pytest.MonkeyPatch, plans: dict[str, Plan]) -> None:
    """All 32 layers, compiled."""
    monkeypatch.setattr(measure, "shallow", lambda model: model)
    short = plans["8B bf16"]
    request = measure.Request(short.model, short.config, "a10g", 1)
    deep = measure.measure(request)
    assert deep.temporaries == pytest.approx(short.step.temporaries, rel=0.001)
    assert deep.weights == short.step.weights


def test_what_was_measured_is_remembered_until_something_changes(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = jaxserve.EngineConfig().resolve(read_model("smollm2-135m"), "gpu")
    request = measure.Request(read_model("smollm2-135m"), config, "l4", 1)
    assert measure._read_cached(request) is None
    measure._write_cached(request, STEP)
    assert measure._read_cached(request) == STEP
    for other in (replace(request, target="a100"), replace(request, config=replace(config, max_num_seqs=8)),
                  replace(request, tensor_parallel_size=3)):
        assert measure._read_cached(other) is None
    monkeypatch.setattr(measure, "step_sources", lambda: {"jaxserve/runner/step.py": "another"})
    assert measure._read_cached(request) is None
    file = measure._cache_file(request)
    file.write_text("{ torn")
    assert measure._read_cached(request) is None


def test_a_card_without_fp8_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(JaxserveError, match=r"fp8.*8\.9"):
        plan("smollm2-135m", target="a100", quantization="fp8", max_num_batched_tokens=256)


def test_without_the_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.planning.planner.measure_all", lambda requests, *, on_done: [
        "compiling for a GPU needs XLA's GPU compiler: pip install 'jaxserve[aot]'"] * len(requests))
    with pytest.raises(JaxserveError, match=r"jaxserve\[aot\]"):
        plan("smollm2-135m", target="a100")
    with pytest.raises(JaxserveError, match=r"jaxserve\[aot\]"):
        plan_all("smollm2-135m")
