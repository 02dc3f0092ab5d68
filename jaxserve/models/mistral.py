"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from typing import Any

DEFAULTS = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}


def options(hf: dict[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields that this family decides; `sliding_window` null means none."""
    return {"layer_windows": (hf["sliding_window"],) * hf["num_hidden_layers"]}
