"""A model's config without its weights: of a checkpoint, a config.json, or a well-known model by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from jaxserve.models.registry import model_config_from_hf

Quantization = Literal["gptq", "awq", "int4", "fp8"]

_QUANTIZATIONS = {
    "gptq": QuantizationConfig(),
    "awq": QuantizationConfig(symmetric=False),
    "int4": QuantizationConfig(),
    "fp8": QuantizationConfig(kind="fp8"),
}
"""As most such checkpoints are: 4 bits in groups of 128, AWQ with zero-points."""


def quantized(model: ModelConfig, quantization: Quantization) -> ModelConfig:
    """The model with its projections' weights stored so."""
    return replace(model, quantization=_QUANTIZATIONS[quantization])


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """config.json of well-known models, by name."""
    return json.loads(resources.files("jaxserve.planning").joinpath("models.json").read_text(encoding="utf-8"))


def read_model(model: str | Path, quantization: str | None = None) -> ModelConfig:
    """
    Args:
      model: a checkpoint as `LLM` takes it, a config.json alone, or one of `known_models`, upper or lower case.
      quantization: of the projections' weights, whatever the checkpoint has.

    Raises:
      ModelNotFoundError: it is none of these.
      InvalidInputError: the config, or quantization, is not one that is supported.
    """
    if quantization is not None and quantization not in get_args(Quantization):
        raise InvalidInputError("quantization", quantization, f"one of {', '.join(get_args(Quantization))}")
    hf = dict(_hf_config(str(model)))
    described = hf.pop("quantization_config", None)
    config = model_config_from_hf(hf)
    if quantization:
        return quantized(config, cast(Quantization, quantization))
    return replace(config, quantization=_described(described)) if described else config


def _hf_config(model: str) -> dict[str, Any]:
    by_name = {name.lower(): config for name, config in known_models().items()}
    if model.lower() in by_name:
        return by_name[model.lower()]
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        return _parsed(path)
    if (path / "config.json").is_file():
        return _parsed(path / "config.json")
    if not model or not path.exists():
        raise ModelNotFoundError("model", model, f"a checkpoint, a config.json, or one of {', '.join(known_models())}")
    from convert.source import open_source  # only a GGUF file needs its readers

    return open_source(path).hf_config


def _described(config: Any) -> QuantizationConfig:
    """What a checkpoint's quantization_config says of its weights."""
    if not isinstance(config, dict):
        raise InvalidInputError("quantization_config", config, "an object")
    method = config.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return QuantizationConfig(kind="fp8")
    bits, group_size = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
    symmetric = method == "gptq" and config.get("sym", True)
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        groups = list(groups.values()) if isinstance(groups, dict) else []
        weights = groups[0].get("weights") or {} if len(groups) == 1 and isinstance(groups[0], dict) else {}
        if (weights.get("num_bits"), weights.get("type")) == (8, "float"):
            return QuantizationConfig(kind="fp8")
        bits, group_size, symmetric = weights.get("num_bits"), weights.get("group_size"), weights.get("symmetric", True)
    if method not in ("gptq", "awq", "compressed-tensors") or bits != 4:
        raise UnsupportedModelError("quantization_config", f"{method}, {bits} bits",
                                    "gptq, awq or compressed-tensors with 4 bits, or fp8")
    return QuantizationConfig(group_size=None if group_size == -1 else group_size, symmetric=symmetric)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError("model", str(path), f"a readable config.json ({error})") from error
    if not isinstance(found, dict):
        raise InvalidInputError("model", str(path), "a config.json, which holds one object")
    return found
