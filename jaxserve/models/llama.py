"""Llama, and what calls itself Llama (SmolLM, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

DEFAULTS = {"max_position_embeddings": 2048}


def options(hf: dict[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields that this family decides; `attention_bias` covers the output projection too."""
    bias = bool(hf.get("attention_bias", False))
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": bool(hf.get("mlp_bias", False))}
