"""Qwen3: an RMSNorm over the head width on q and k, a head width of its own, and biases only if asked for."""

from __future__ import annotations

from typing import Any

from jaxserve.models.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from jaxserve.models.qwen2 import layer_windows

DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}


def options(hf: dict[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields that this family decides; `attention_bias` covers the output projection too."""
    bias = bool(hf.get("attention_bias", False))
    return {"qk_norm": True, "attention_bias": bias, "attention_out_bias": bias, "layer_windows": layer_windows(hf)}
