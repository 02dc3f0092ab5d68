"""The only reader of Hugging Face configs: architecture names, shared fields, and RoPE in its old and new spelling."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxserve.config import ModelConfig, RopeConfig, RopeKind
from jaxserve.errors import InvalidInputError, UnsupportedModelError
from jaxserve.models import llama, mistral, qwen2, qwen3

FAMILIES: dict[str, ModuleType] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
"""A family module has `DEFAULTS`, what transformers assumes where a config is silent, and `options(hf)`."""

_SHARED_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}

_ROPE_KINDS: dict[str, RopeKind] = {
    "default": "none", "linear": "linear", "dynamic": "dynamic", "llama3": "llama3", "yarn": "yarn",
}

_DTYPES = ("float32", "bfloat16", "float16")
_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor")
_YARN_FIELDS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def model_config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Reads a checkpoint's config.json.

    Args:
      hf: the file's content, as written by transformers 4 or 5.

    Raises:
      UnsupportedModelError: the architecture, or an option of it, is not implemented.
      InvalidInputError: a required field is missing.
    """
    architecture = _supported_architecture(hf)
    family = FAMILIES[architecture]
    known = {**_SHARED_DEFAULTS, **family.DEFAULTS, **hf}
    _refuse_unsupported_options(known)
    hidden_size, num_heads = _required(known, "hidden_size"), _required(known, "num_attention_heads")
    head_dim = known.get("head_dim") or hidden_size // num_heads
    if head_dim % 2:
        raise UnsupportedModelError("head_dim", head_dim, "an even width, for rotary embeddings")
    num_layers = _required(known, "num_hidden_layers")
    rope, max_position = _rope_config(known)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_required(known, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(known, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=known.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=known["rms_norm_eps"],
        rope=rope,
        tie_word_embeddings=known["tie_word_embeddings"],
        dtype=_dtype(known),
        hf_config=hf,
        **family.options(known),
    )


def _supported_architecture(hf: dict[str, Any]) -> str:
    architectures = hf.get("architectures") or [None]
    if architectures[0] not in FAMILIES:
        raise UnsupportedModelError("architectures", architectures[0], f"one of {', '.join(FAMILIES)}")
    return architectures[0]


def _refuse_unsupported_options(hf: dict[str, Any]) -> None:
    if hf.get("quantization_config") is not None:
        method = hf["quantization_config"].get("quant_method")
        raise UnsupportedModelError("quantization_config", method, "an unquantised checkpoint")
    if hf["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedModelError("hidden_act", hf["hidden_act"], "silu")


def _dtype(hf: dict[str, Any]) -> Any:
    """transformers 5 writes `dtype`, older versions `torch_dtype`; a config without either is taken for bfloat16."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModelError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return name


def _required(hf: dict[str, Any], field: str) -> int:
    value = hf.get(field)
    if not isinstance(value, int) or value < 1:
        raise InvalidInputError(field, value, "the model's config must give a positive integer")
    return value


def _rope_config(hf: dict[str, Any]) -> tuple[RopeConfig, int]:
    """RoPE's options and the longest context in tokens.

    transformers 5 writes `rope_parameters` with `rope_theta` inside; older configs have `rope_theta` beside
    `rope_scaling`, whose kind is under "rope_type" or "type". Where both are given it prefers `rope_scaling`.
    The longest context is the config's own, except that YaRN configs give the trained one there and state the stretch.
    """
    max_position = _required(hf, "max_position_embeddings")
    params = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    theta = params.get("rope_theta") or hf.get("rope_theta") or 10000.0
    name = params.get("rope_type", params.get("type", "default"))
    if name not in _ROPE_KINDS or any(isinstance(value, dict) for value in params.values()):
        raise UnsupportedModelError("rope_type", name, f"one of {', '.join(_ROPE_KINDS)}, the same for all layers")
    if (params.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor", params.get("partial_rotary_factor"), "1.0 or absent")
    kind = _ROPE_KINDS[name]
    if kind == "none":
        return RopeConfig(theta=theta), max_position
    trained = max_position
    if kind in ("llama3", "yarn"):
        field = "original_max_position_embeddings"
        trained = hf.get(field) or params.get(field) or max_position
    factor = params.get("factor") or (max_position / trained if kind == "yarn" else None)
    if factor is None:
        raise InvalidInputError("factor", factor, f"rope_type {name} needs one")
    rope = RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=trained,
                      **_rope_extras(kind, params))
    return rope, max(max_position, int(trained * factor)) if kind == "yarn" else max_position


def _rope_extras(kind: RopeKind, params: dict[str, Any]) -> dict[str, Any]:
    """The options that only this kind reads. YaRN treats 0 and null as absent, like transformers."""
    if kind == "llama3":
        for field in _LLAMA3_FIELDS:
            if params.get(field) is None:
                raise InvalidInputError(field, None, "rope_type llama3 needs it")
        return {field: params[field] for field in _LLAMA3_FIELDS}
    if kind == "yarn":
        given = {field: params[field] for field in _YARN_FIELDS if params.get(field)}
        return {**given, "truncate": params.get("truncate", True)}
    return {}
