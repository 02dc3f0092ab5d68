"""Reading HF configs: what each family means by its fields, both spellings of RoPE, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidInputError, UnsupportedModelError
from jaxserve.models.registry import model_config_from_hf

BASE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "hidden_act": "silu"}


def read(architecture: str = "Llama", **fields: Any) -> ModelConfig:
    return model_config_from_hf({**BASE, "architectures": [f"{architecture}ForCausalLM"], **fields})


def test_shared_fields() -> None:
    config = read(tie_word_embeddings=True, torch_dtype="bfloat16")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (97, 48, 80, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (4, 2, 12, 64)
    assert config.rms_norm_eps == 1e-5 and config.tie_word_embeddings and config.dtype == "bfloat16"
    assert config.layer_windows == (None, None, None) and config.hf_config["vocab_size"] == 97
    hash(config)


def test_silent_configs_get_the_family_defaults() -> None:
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read("Qwen3").head_dim == 128
    bare = {name: value for name, value in BASE.items() if name not in ("max_position_embeddings", "rms_norm_eps")}
    config = model_config_from_hf(bare)
    assert config.max_position == 2048 and config.rms_norm_eps == 1e-6 and not config.tie_word_embeddings


def test_biases() -> None:
    def biases(*args: str, **fields: Any) -> tuple[bool, bool, bool]:
        config = read(*args, **fields)
        return config.attention_bias, config.attention_out_bias, config.mlp_bias

    assert biases() == (False, False, False)
    assert biases(attention_bias=True) == (True, True, False)
    assert biases(mlp_bias=True) == (False, False, True)
    assert biases("Mistral", attention_bias=True, mlp_bias=True) == (False, False, False)
    assert biases("Qwen2") == (True, False, False)
    assert biases("Qwen3") == (False, False, False)
    assert biases("Qwen3", attention_bias=True) == (True, True, False)


def test_windows() -> None:
    sliding: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert read(sliding_window=8).layer_windows == (None, None, None)
    assert read("Mistral", sliding_window=8).layer_windows == (8, 8, 8)
    assert read("Mistral", sliding_window=None).layer_windows == (None, None, None)
    for family in ("Qwen2", "Qwen3"):
        assert read(family, sliding_window=8).layer_windows == (None, None, None)
        assert read(family, **sliding, max_window_layers=1).layer_windows == (None, 8, 8)
        assert read(family, **sliding).layer_windows == (None, None, None)  # max_window_layers is 28
        assert read(family, **sliding, layer_types=kinds).layer_windows == (None, 8, None)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read("Qwen3", layer_types=["chunked_attention"] * 3)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
])
def test_rope_spellings(fields: dict) -> None:
    rope = read(**fields).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)


def test_rope_defaults() -> None:
    assert read().rope.kind == "none" and read().rope.theta == 10000.0
    assert read(rope_theta=1e6, rope_scaling=None).rope.theta == 1e6
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 3e4}).rope.theta == 3e4


def test_longest_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read(rope_scaling=yarn).max_position == 256  # the config gives the trained context
    assert read(rope_scaling={**yarn, "original_max_position_embeddings": 16}).max_position == 64
    assert read(rope_scaling={"type": "dynamic", "factor": 4.0}).max_position == 64
    config = read(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 16})
    assert config.max_position == 64 and config.rope.original_max_position == 16


@pytest.mark.parametrize(("fields", "named"), [
    ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
    ({"architectures": None}, ["architectures", "MistralForCausalLM"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "llama3", "yarn"]),
    ({"rope_scaling": {"type": "mrope"}}, ["mrope"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_type", "same for all layers"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
    ({"head_dim": 15}, ["head_dim", "15"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads", "num_key_value_heads=3"]),
    ({"torch_dtype": "float64"}, ["dtype", "float64", "bfloat16"]),
])
def test_refused(fields: dict, named: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        model_config_from_hf({**BASE, **fields})
    for word in named:
        assert word in str(refusal.value)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_missing_fields_are_named(field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        model_config_from_hf({name: value for name, value in BASE.items() if name != field})


def test_a_null_quantization_config_is_none() -> None:
    assert read(quantization_config=None).architecture == "LlamaForCausalLM"
