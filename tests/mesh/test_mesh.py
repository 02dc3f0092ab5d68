"""Tensor parallelism on simulated devices equals one device (H21, and bar 11 of the engine's issue)."""

import json
import os
import subprocess
import sys

import pytest

from tests.mesh.worker import PROMPT
from tests.tiny import make_tiny_model, reference_greedy, reference_logprobs, reference_model

MODELS = {
    "plain": {},  # 4 heads, 2 KV heads, 350 ids: not divisible by 4
    "few": dict(num_attention_heads=8, num_key_value_heads=2, vocab_size=97),
    "few bias": dict(num_attention_heads=8, num_key_value_heads=2, vocab_size=96, attention_bias=True,
                     tie_word_embeddings=True),
    "one": dict(num_attention_heads=4, num_key_value_heads=1, vocab_size=97),
    "one bias": dict(num_attention_heads=4, num_key_value_heads=1, vocab_size=97, attention_bias=True),
    "three heads": dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=24),
    "six heads": dict(num_attention_heads=6, num_key_value_heads=6, hidden_size=48),
    "odd mlp": dict(intermediate_size=63),
}
RUN = [("plain", "config-1"), ("plain", "config-2"), ("plain", "config-4"), ("plain", "given-2"), ("few", "config-4"),
       ("few bias", "config-4"), ("one", "config-2"), ("one bias", "config-2")]
REFUSED = [("three heads", "config-2"), ("six heads", "config-4"), ("odd mlp", "config-2"), ("plain", "config-16"),
           ("plain", "config-8"), ("plain", "mesh without the axis"), ("plain", "mesh with two axes")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import torch

    root = tmp_path_factory.mktemp("mesh")
    for name, options in MODELS.items():
        folder = make_tiny_model(root / name, **options)
        if "bias" in name:  # fresh ones are 0
            model = reference_model(folder)
            torch.manual_seed(1)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith("bias"):
                        parameter.normal_(0, 0.5)
            model.save_pretrained(folder)
    return root


@pytest.fixture(scope="module")
def results(folders):
    cases = [{"model": model, "mesh": mesh, "refuse": pairs is REFUSED}
             for pairs in (RUN, REFUSED) for model, mesh in pairs]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.mesh.worker", str(folders), json.dumps(cases)]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(cases), f"only {len(lines)} of {len(cases)} cases: {done.stderr[-3000:]}"
    return {(line["model"], line["mesh"]): line for line in lines}


@pytest.mark.parametrize(("model", "mesh"), RUN)
def test_logprobs_and_tokens_equal_one_device(folders, results, model, mesh):
    result = results[model, mesh]
    reference = reference_model(folders / model)
    assert result["tokens"] == reference_greedy(reference, PROMPT, 10)
    expected = reference_logprobs(reference, PROMPT + result["tokens"])
    worst = 0.0
    for position, entry in enumerate(result["logprobs"][1:]):
        assert len(entry) >= 20
        worst = max(worst, *(abs(value - expected[position, int(token_id)].item())
                             for token_id, value in entry.items()))
    print(f"{model}, {mesh}: largest difference of log-probabilities {worst:.1e}")
    assert worst < 1e-4
    assert result["updated"] and result["state_ok"]
    if model == "plain":
        assert result["seeded"] == results["plain", "config-1"]["seeded"]


@pytest.mark.parametrize(("model", "mesh"), RUN)
def test_each_device_holds_its_own_heads(results, model, mesh):
    result, size = results[model, mesh], int(mesh[-1])
    heads, kv_heads = MODELS[model].get("num_attention_heads", 4), MODELS[model].get("num_key_value_heads", 2)
    stored = max(kv_heads, size)
    assert result["cache"][2] == stored and result["cache_shard"][2] == stored // size
    assert result["qkv_shard"][:2] == [stored // size, heads // stored + 2]
    assert result["mlp_shard"][1] == 64 // size
    assert result["devices"] == (list(range(8 - size, 8)) if mesh.startswith("given") else list(range(size)))


@pytest.mark.parametrize(("model", "mesh"), RUN)
def test_a_step_moves_activations_only(results, model, mesh):
    """Two all-reduces a layer; the embedding takes one more where its table is tied to a split output head, and an
    all-gather where it is not. The sampler exchanges two numbers a row, and branches that run only when asked for
    (penalties, log-probabilities) the logits. Never weights or caches."""
    size, hidden = int(mesh[-1]), MODELS[model].get("hidden_size", 32)
    vocab_size = MODELS[model].get("vocab_size", 350)
    splits_vocab = size > 1 and vocab_size % size == 0
    for kind, num_tokens in (("decode", 1), ("mixed", 16)):
        counts = dict(results[model, mesh][kind])
        print(f"{model}, {mesh}, {kind}: {counts}")
        # Row-major, feature-major, or one row cut into slices.
        shapes = {f"{num_tokens},{hidden}", f"{hidden},{num_tokens}", f"8,{hidden // 8}"}
        of_hidden = sum(counts.pop(f"all-reduce f32[{shape}]", 0) for shape in shapes)
        tied = MODELS[model].get("tie_word_embeddings", False)
        assert of_hidden == (0 if size == 1 else 4 + (tied and splits_vocab))
        assert counts.pop(f"all-gather f32[{num_tokens},{hidden}]", 0) == (size > 1 and not tied)
        if splits_vocab:
            assert counts.pop(f"all-gather f32[2,1,{size}]") >= 1  # each device's best, in every branch
            assert counts.pop(f"all-gather f32[1,{vocab_size}]", 0) <= 2
            assert counts.pop(f"all-gather f32[16,{vocab_size}]", 0) <= (kind == "mixed")  # prompt log-probabilities
            counts = {name: count for name, count in counts.items() if not name.startswith("all-reduce")}
        assert not counts


@pytest.mark.parametrize(("model", "mesh"), REFUSED)
def test_h21_what_cannot_be_divided_is_refused_at_load(results, model, mesh):
    result = results[model, mesh]
    print(result["message"])
    field = "mesh" if mesh.startswith("mesh") else "mesh.tensor" if mesh == "config-16" else "tensor_parallel_size"
    assert result["field"] == field
