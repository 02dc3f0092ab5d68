"""Writes GGUF files as llama.cpp's converter does, independently of the code under test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
F32 = gguf.GGMLQuantizationType.F32


def gguf_name(name: str) -> str:
    stem, leaf = name.rsplit(".", 1)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
    return f"blk.{match[1]}.{NAMES[match[2]]}.{leaf}" if match else f"{NAMES[stem]}.{leaf}"


def pairwise_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Each head's rows as llama.cpp wants them for llama: row j of the first half, row j of the second half, ..."""
    head_dim = weight.shape[0] // num_heads
    order = [head * head_dim + half * (head_dim // 2) + row
             for head in range(num_heads) for row in range(head_dim // 2) for half in (0, 1)]
    return np.ascontiguousarray(weight[order])


def write_gguf(path: Path, weights: Mapping[str, np.ndarray], hf: Mapping[str, Any], *, arch: str = "llama",
               kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
               extra: Mapping[str, Any] | None = None, extra_tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """Args:
      weights: float32 arrays by HF name; `hf` the config they belong to.
      kinds: HF name ending -> how to store such weights; the others are float32.
      extra: more metadata; a value of None leaves a key out.
    """
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        f"{arch}.context_length": hf["max_position_embeddings"], f"{arch}.embedding_length": hf["hidden_size"],
        f"{arch}.block_count": hf["num_hidden_layers"], f"{arch}.feed_forward_length": hf["intermediate_size"],
        f"{arch}.attention.head_count": heads, f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6, f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.key_length": hf.get("head_dim") or hf["hidden_size"] // heads, **(extra or {}),
    }
    for key, value in metadata.items():
        add(writer, key, value)
    for name, weight in weights.items():
        if arch == "llama" and ".q_proj." in name:
            weight = pairwise_rows(weight, heads)
        elif arch == "llama" and ".k_proj." in name:
            weight = pairwise_rows(weight, kv_heads)
        kind = next((kind for ending, kind in (kinds or {}).items() if name.endswith(ending)), F32)
        if kind == F32:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name, weight in (extra_tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
