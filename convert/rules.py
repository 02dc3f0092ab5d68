"""The one table that says where each tensor of a Hugging Face checkpoint goes.

Every rule reads both ways: the loader asks which HF tensors make up one of our parameters, the checks ask which names
of a checkpoint nobody wants. Weights keep torch's [out, in] order, so nothing is ever transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.config import ModelConfig, kv_groups

Part = Literal["whole", "heads_in", "q", "k", "v", "gate", "up"]


@dataclass(frozen=True)
class Rule:
    """One HF tensor and its place.

    Attributes:
      hf: the HF name; {i} stands for the layer, {leaf} for weight or bias.
      path: our parameter's dotted path, with the same placeholders.
      part: which part of that parameter the tensor is; `slot` says what each part means.
    """

    hf: str
    path: str
    part: Part = "whole"


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."

RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule(_LAYER + "input_layernorm.weight", _OURS + "input_norm.weight"),
    Rule(_LAYER + "self_attn.q_proj.{leaf}", _OURS + "attention.qkv.{leaf}", "q"),
    Rule(_LAYER + "self_attn.k_proj.{leaf}", _OURS + "attention.qkv.{leaf}", "k"),
    Rule(_LAYER + "self_attn.v_proj.{leaf}", _OURS + "attention.qkv.{leaf}", "v"),
    Rule(_LAYER + "self_attn.q_norm.weight", _OURS + "attention.q_norm.weight"),
    Rule(_LAYER + "self_attn.k_norm.weight", _OURS + "attention.k_norm.weight"),
    Rule(_LAYER + "self_attn.o_proj.weight", _OURS + "attention.out.weight", "heads_in"),
    Rule(_LAYER + "self_attn.o_proj.bias", _OURS + "attention.out.bias"),
    Rule(_LAYER + "post_attention_layernorm.weight", _OURS + "post_attention_norm.weight"),
    Rule(_LAYER + "mlp.gate_proj.{leaf}", _OURS + "mlp.gate_up.{leaf}", "gate"),
    Rule(_LAYER + "mlp.up_proj.{leaf}", _OURS + "mlp.gate_up.{leaf}", "up"),
    Rule(_LAYER + "mlp.down_proj.{leaf}", _OURS + "mlp.down.{leaf}"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "lm_head.weight"),
)

# Buffers that old checkpoints saved along with the weights.
_IGNORED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.(masked_bias|attn\.bias)")


def _compile(template: str) -> re.Pattern[str]:
    pattern = re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{leaf\}", "(?P<leaf>weight|bias)")
    return re.compile(pattern)


_PATHS = [(_compile(rule.path), rule) for rule in RULES]


def tensors_of(path: str) -> list[tuple[str, Part]]:
    """The HF tensors that make up the parameter at `path`: (HF name, part). Empty if no rule knows the path."""
    found = []
    for pattern, rule in _PATHS:
        if match := pattern.fullmatch(path):
            found.append((rule.hf.format(**match.groupdict()), rule.part))
    return found


def unexpected(names: Iterable[str], wanted: Iterable[str], config: ModelConfig) -> list[str]:
    """The names in a checkpoint that nobody asked for and that are not known to be harmless."""
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return sorted(name for name in set(names) - set(wanted) - ignored if not _IGNORED.fullmatch(name))


def hf_shape(shape: tuple[int, ...], part: Part, config: ModelConfig) -> tuple[int, ...]:
    """The shape the HF tensor must have to fill its part of a parameter of this shape."""
    match part:
        case "heads_in":  # [D, K, G, H] <- [D, N*H]
            return shape[0], config.num_heads * config.head_dim
        case "q":  # [K, G+2, H, ...] <- [N*H, ...]
            return config.num_heads * config.head_dim, *shape[3:]
        case "k" | "v":
            return config.num_kv_heads * config.head_dim, *shape[3:]
        case "gate" | "up":  # [2, F, ...] <- [F, ...]
            return shape[1:]
        case _:
            return shape


def slot(param: np.ndarray, part: Part, repeats: int) -> np.ndarray:
    """The view of a parameter, on the host, that one HF tensor fills in row-major order.

    With repeated KV heads (`repeats` > 1) it is the first copy of each key and value head; `repeat_kv` makes the
    others.
    """
    match part:
        case "q":
            return param[:, :-2]
        case "k":
            return param[::repeats, -2]
        case "v":
            return param[::repeats, -1]
        case "gate":
            return param[0]
        case "up":
            return param[1]
        case _:
            return param


def repeat_kv(param: np.ndarray, repeats: int) -> None:
    """Copies, in place, the key and value heads of a fused qkv parameter to the other ranks that need them."""
    for copy in range(1, repeats):
        param[copy::repeats, -2:] = param[::repeats, -2:]


def kv_repeats(config: ModelConfig, tensor_parallel_size: int) -> int:
    """How often each KV head is stored at this tensor-parallel size."""
    return kv_groups(config, tensor_parallel_size)[0] // config.num_kv_heads
