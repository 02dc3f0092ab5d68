"""GGUF files give the weights and the config that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from convert.gguf import llama3_scaling
from convert.source import TensorSource, open_source
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.forward import forward
from jaxserve.models.params import model_from_params
from jaxserve.models.registry import model_config_from_hf
from tests.convert.checkpoints import assert_same, expected_params, load, tiny_checkpoint
from tests.convert.ggufs import gguf_name, write_gguf
from tests.models.helpers import jaxserve_params


def make(path: Path, family: str = "Llama", *, options: dict[str, Any] | None = None,
         **how: Any) -> tuple[Any, dict[str, np.ndarray]]:
    model, hf = tiny_checkpoint(family, **(options or {}))
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if hf.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    write_gguf(path, weights, {**hf, **model.config.to_dict()}, arch=family.lower(), **how)
    return model, weights


def tensors(path: Path) -> dict[str, np.ndarray]:
    source = open_source(path)
    assert isinstance(source, TensorSource)
    return dict(source.tensors())


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "4 heads, 2 KV": ("Llama", HEADS),
    "8 heads, 2 KV": ("Llama", {**HEADS, "num_attention_heads": 8, "hidden_size": 64}),
    "tied": ("Llama", {**HEADS, "tie_word_embeddings": True}),
    "biases": ("Llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {**HEADS, "hidden_size": 64, "num_attention_heads": 8}),
    "qwen3": ("Qwen3", {**HEADS, "head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_in_the_original_order_again(tmp_path: Path, case: str) -> None:
    """Fault H20: q is put back with the head count, k with the KV head count, v is not touched."""
    family, options = CASES[case]
    model, weights = make(tmp_path / "model.gguf", family, options=options)
    assert_same(tensors(tmp_path / "model.gguf"), weights)
    params = load(tmp_path / "model.gguf")
    assert_same(params, expected_params(tmp_path / "model.gguf", weights))
    config = model_config_from_hf(open_source(tmp_path).hf_config)
    token_ids = np.random.default_rng(0).integers(0, 97, (1, 19))
    with torch.no_grad():
        expected = model(torch.from_numpy(token_ids)).logits.numpy()
    logits = forward(model_from_params(config, params), jnp.asarray(token_ids, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_config_equals_the_original(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    model, _ = make(tmp_path / "model.gguf", family, options=options)
    _, hf = tiny_checkpoint(family, **options)
    assert model_config_from_hf(open_source(tmp_path).hf_config) == model_config_from_hf({**hf, "dtype": "float32"})
    assert model.config.rms_norm_eps == open_source(tmp_path).hf_config["rms_norm_eps"]


WIDE = {**HEADS, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantised_types_equal_the_packages(tmp_path: Path, kind: Kind) -> None:
    """Our own decoders and those of the gguf package agree to the last bit, in chunks or whole."""
    _, weights = make(tmp_path / "model.gguf", options={**WIDE, "vocab_size": 2000},
                      kinds={"proj.weight": kind, "embed_tokens.weight": kind})
    found = tensors(tmp_path / "model.gguf")
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight",
                 "model.layers.0.mlp.down_proj.weight"):
        expected = gguf.quants.dequantize(gguf.quants.quantize(weights[name], kind), kind)
        np.testing.assert_array_equal(found[name].astype(np.float32), expected)
    source = open_source(tmp_path)
    named = {name: array.astype(np.float32) for name, array in found.items()}
    assert_same(load(tmp_path), jaxserve_params(named, model_config_from_hf(source.hf_config)))
    assert source.hf_config.get("dtype") == {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind)
    rounded = {path: array.astype(jnp.bfloat16) for path, array in load(tmp_path).items()}
    assert_same(load(tmp_path, dtype="bfloat16"), rounded)


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quants_are_read(tmp_path: Path, kind: Kind) -> None:
    """The package cannot write these: random bytes with finite scales stand in for a tensor."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (2000, 256 // block_elements * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    for key, value in (("embedding_length", 256), ("feed_forward_length", 256), ("block_count", 0),
                       ("context_length", 8), ("attention.head_count", 4)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    found = tensors(tmp_path / "model.gguf")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))


def plain_dequantise(raw: np.ndarray, kind: str) -> np.ndarray:
    """Straight from the formats' definitions: 32 weights a block; q4_1 w = d*q + m, q8_0 w = d*q."""
    if kind == "F32":
        return raw.view(np.float32)
    if kind == "Q8_0":
        blocks = raw.reshape(-1, 34)
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        return (blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(len(raw), -1)
    assert kind == "Q4_1"
    blocks = raw.reshape(-1, 20)
    scale, least = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    levels = np.concatenate([blocks[:, 4:] % 16, blocks[:, 4:] // 16], axis=1).astype(np.float32)
    return (levels * scale + least).reshape(len(raw), -1)


def test_smollm2_equals_an_independent_reading(smollm2: Path) -> None:
    """All 272 tensors, read with gguf's own reader, decoded and put in order here."""
    source = open_source(smollm2)
    found = tensors(smollm2)
    stored = gguf.GGUFReader(smollm2).tensors
    assert len(stored) == len(found) == 272 and source.hf_config["tie_word_embeddings"]
    by_gguf_name = {gguf_name(name): array for name, array in found.items()}
    for tensor in stored:
        expected = plain_dequantise(tensor.data, tensor.tensor_type.name)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            num_heads = 9 if ".attn_q." in tensor.name else 3
            row = np.arange(64)
            within = np.where(row < 32, 2 * row, 2 * (row - 32) + 1)  # HF row -> stored row
            expected = expected[(np.arange(num_heads)[:, None] * 64 + within).reshape(-1)]
        np.testing.assert_array_equal(by_gguf_name[tensor.name], expected, err_msg=tensor.name)


def test_smollm2_config(smollm2: Path) -> None:
    source = open_source(smollm2)
    config = model_config_from_hf(source.hf_config)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_position, config.rms_norm_eps, config.rope.theta) == (49152, 8192, 1e-5, 1e5)
    assert source.generation_config == {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 2}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("factor", "original", "theta", "head_dim"),
                         [(8.0, 8192, 500000.0, 128), (32.0, 8192, 500000.0, 64), (8.0, 2048, 10000.0, 64)])
def test_llama3_frequency_factors_become_config(factor: float, original: int, theta: float, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**LLAMA3, "factor": factor, "original_max_position_embeddings": original, "rope_theta": theta}
    config = LlamaConfig(head_dim=head_dim, rope_parameters=scaling, max_position_embeddings=131072)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = theta ** -(np.arange(0, head_dim, 2) / head_dim) / stretched.numpy()
    found = llama3_scaling(factors.astype(np.float32), theta, head_dim)
    assert found == {key: value for key, value in scaling.items() if key != "rope_theta"}


def test_rope_scaling(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    for extra, extra_tensors, expected in [
        ({}, {}, None), ({}, {"rope_freqs.weight": ones}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {},
         {"rope_type": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {}, {"rope_type": "linear", "factor": 2.0}),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
          "llama.rope.scaling.original_context_length": 32, "llama.rope.scaling.yarn_beta_fast": 16.0}, {},
         {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}),
    ]:
        make(tmp_path / "model.gguf", options=HEADS, extra=extra, extra_tensors=extra_tensors)
        source = open_source(tmp_path)
        assert source.hf_config["rope_scaling"] == expected
        assert "rope_freqs.weight" not in source.names_and_shapes()  # type: ignore[attr-defined]
    make(tmp_path / "model.gguf", options=HEADS, extra_tensors={"rope_freqs.weight": ones * [1, 5, 2, 8]})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        open_source(tmp_path)


@pytest.mark.parametrize(("extra", "message"), [
    ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
    ({"llama.expert_count": 8}, "expert_count=8"), ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4"),
    ({"split.count": 3}, "split.count=3"), ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
    ({"llama.attention.value_length": 16}, "value_length=16"),
])
def test_what_is_not_implemented_is_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    make(tmp_path / "model.gguf", options=HEADS, extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        open_source(tmp_path)


def test_the_same_value_for_every_layer_is_one_value(tmp_path: Path) -> None:
    make(tmp_path / "model.gguf", options=HEADS, extra={"llama.attention.head_count_kv": [2, 2]})
    assert open_source(tmp_path).hf_config["num_key_value_heads"] == 2


def test_unknown_architecture_and_missing_keys(tmp_path: Path) -> None:
    _, hf = tiny_checkpoint("Llama")
    write_gguf(tmp_path / "a.gguf", {}, hf, arch="mamba")
    with pytest.raises(UnsupportedModelError, match=r"general\.architecture='mamba'"):
        open_source(tmp_path / "a.gguf")
    make(tmp_path / "b.gguf", extra={"llama.block_count": None})
    with pytest.raises(CheckpointError, match=r"b\.gguf: metadata key llama\.block_count is missing"):
        open_source(tmp_path / "b.gguf")


def test_unknown_tensors_are_reported(tmp_path: Path) -> None:
    make(tmp_path / "model.gguf", extra_tensors={"blk.0.ffn_gate_exps.weight": np.zeros((2, 3), np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): blk\.0\.ffn_gate_exps\.weight \[2, 3\]"):
        load(tmp_path)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    make(tmp_path / "whole.gguf", extra={"tokenizer.ggml.tokens": ["a", "bc"] * 50})
    data = (tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "part.gguf"
    for size in (*range(4, 3000, 97), len(data) // 2, len(data) - 1000):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"part\.gguf: truncated"):
            open_source(file)
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"truncated: tensor (blk|output|token)\S* ends at byte"):
        open_source(file)
    for content in (b"", b"GG", b"GGML" + data[4:], b"\x7fELF"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"part\.gguf: not a GGUF file"):
            open_source(file)
    for version in (b"\x01\0\0\0", b"\0\0\0\x03"):
        file.write_bytes(data[:4] + version + data[8:])
        with pytest.raises(UnsupportedModelError, match="GGUF version"):
            open_source(file)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    make(tmp_path / "model.gguf")
    source = open_source(tmp_path)
    assert isinstance(source, TensorSource)
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.truncate(3000)
    with pytest.raises(CheckpointError, match=r"model\.gguf: truncated inside tensor output\.weight"):
        source.read("lm_head.weight", np.empty((97, 48), np.float32))


def test_ends_of_text(tmp_path: Path) -> None:
    make(tmp_path / "model.gguf", extra={"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7,
                                         "tokenizer.ggml.bos_token_id": 1})
    assert open_source(tmp_path).generation_config == {"eos_token_id": [5, 7], "bos_token_id": 1}
