"""Qwen2 and Qwen2.5: biases on q, k and v alone; a sliding window on some layers if asked for."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import UnsupportedModelError

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
            "max_window_layers": 28}


def options(hf: dict[str, Any]) -> dict[str, Any]:
    """`ModelConfig` fields that this family decides."""
    return {"attention_bias": True, "layer_windows": layer_windows(hf)}


def layer_windows(hf: dict[str, Any]) -> tuple[int | None, ...]:
    """Windows where `use_sliding_window` is set: as `layer_types` says, else from layer `max_window_layers` on.

    Raises:
      UnsupportedModelError: `layer_types` has the wrong length or a kind that is neither full nor sliding.
    """
    num_layers = hf["num_hidden_layers"]
    window = hf["sliding_window"] if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= hf["max_window_layers"] else None for layer in range(num_layers))
    if len(kinds) != num_layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError("layer_types", kinds, f"{num_layers} of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
