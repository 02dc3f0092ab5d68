"""A GGUF file seen as a Hugging Face checkpoint: config from its metadata, tensors under HF names in HF's row order."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy then knows bfloat16 by name
import numpy as np

from convert.gguf_file import GGUFFile
from convert.source import TensorSource, TokenizerData
from jaxserve.errors import CheckpointError, UnsupportedModelError

# Architecture -> HF class. llama.cpp's converter reorders q and k rows for llama only (Mistral files say llama too).
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROPE_FACTORS = "rope_freqs.weight"


class GGUFSource(TensorSource):
    """See `TensorSource`.

    Raises:
      CheckpointError: the file is broken or lacks a key that every model has.
      UnsupportedModelError: an architecture or an option that is not implemented.
    """

    def __init__(self, path: Path):
        self.name, self._file = str(path), GGUFFile(path)
        metadata = self._file.metadata
        self._arch = metadata.get("general.architecture", "")
        if self._arch not in _ARCHITECTURES:
            raise UnsupportedModelError("general.architecture", self._arch,
                                        f"one of {', '.join(_ARCHITECTURES)} (in {path})")
        if metadata.get("split.count", 1) > 1:
            raise UnsupportedModelError("split.count", int(metadata["split.count"]), f"1: {path} is one of several; "
                                        "join them with llama.cpp's llama-gguf-split --merge")
        self._names = {_hf_name(name): name for name in self._file.entries if name != _ROPE_FACTORS}
        self.hf_config = self._config()
        ends = [int(metadata[key]) for kind in ("eos", "eot", "eom")
                if (key := f"tokenizer.ggml.{kind}_token_id") in metadata]
        self.generation_config = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
        for kind, key in (("bos", "bos"), ("pad", "padding")):
            if f"tokenizer.ggml.{key}_token_id" in metadata:
                self.generation_config[f"{kind}_token_id"] = int(metadata[f"tokenizer.ggml.{key}_token_id"])

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        return {hf: self._file.entries[name].shape for hf, name in self._names.items()}

    def dtype_of(self, name: str) -> np.dtype:
        return np.dtype(_DTYPES.get(self._file.entries[self._names[name]].type_name, "float32"))

    def read(self, name: str, out: np.ndarray) -> None:
        heads = None
        if self._arch == "llama" and ".q_proj." in name:
            heads = self.hf_config["num_attention_heads"]
        elif self._arch == "llama" and ".k_proj." in name:
            heads = self.hf_config["num_key_value_heads"]
        self._file.read(self._names[name], out, heads)

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.model" in self._file.metadata

    def tokenizer(self) -> TokenizerData:
        from convert.gguf_tokenizer import build_tokenizer

        return build_tokenizer(self._file.metadata, self.name)

    def _key(self, key: str, default: Any = None) -> Any:
        """A metadata value of the architecture; required if there is no default."""
        value = self._file.metadata.get(f"{self._arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.name}: metadata key {self._arch}.{key} is missing")
        if isinstance(value, np.ndarray):  # one value a layer
            if len(set(value.tolist())) != 1:
                raise UnsupportedModelError(f"{self._arch}.{key}", value.tolist(), "the same value in every layer")
            return value.tolist()[0]
        return value

    def _config(self) -> dict[str, Any]:
        hidden, heads = self._key("embedding_length"), self._key("attention.head_count")
        head_dim = self._key("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._key(key, head_dim) != head_dim:
                raise UnsupportedModelError(f"{self._arch}.{key}", self._key(key), f"the head width, {head_dim}")
        if self._key("expert_count", 0):
            raise UnsupportedModelError(f"{self._arch}.expert_count", self._key("expert_count"),
                                        "0: mixtures of experts are not read from GGUF")
        if "model.embed_tokens.weight" not in self._names:
            raise CheckpointError(f"{self.name}: tensor token_embd.weight is missing")
        config = {
            "architectures": [_ARCHITECTURES[self._arch]],
            "model_type": self._arch,
            "vocab_size": self.names_and_shapes()["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._key("context_length"),
            "rms_norm_eps": _shortest(self._key("attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._key("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(head_dim),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self._names,
        }
        if self._arch == "llama":
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._names
            config["mlp_bias"] = "model.layers.0.mlp.down_proj.bias" in self._names
        stored = self._file.entries["token_embd.weight"].type_name
        if stored in _DTYPES:  # a quantised file has no dtype of its own
            config["dtype"] = _DTYPES[stored]
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            config[f"{kind}_token_id"] = _optional_int(self._file.metadata.get(f"tokenizer.ggml.{key}_token_id"))
        return config

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._file.entries:
            factors = np.empty(self._file.entries[_ROPE_FACTORS].shape, np.float32)
            self._file.read(_ROPE_FACTORS, factors)
            return llama3_scaling(factors, _shortest(self._key("rope.freq_base", 10000.0)), head_dim)
        if self._key("rope.scale_linear", 1.0) != 1.0:  # how files of 2023 say it
            return {"rope_type": "linear", "factor": _shortest(self._key("rope.scale_linear"))}
        kind = self._key("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise UnsupportedModelError(f"{self._arch}.rope.scaling.type", kind, "none, linear or yarn")
        scaling = {"rope_type": kind, "factor": _shortest(self._key("rope.scaling.factor"))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._key("rope.scaling.original_context_length")
            for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if f"{self._arch}.rope.scaling.{theirs}" in self._file.metadata:
                    scaling[ours] = _shortest(self._key(f"rope.scaling.{theirs}"))
            for name in ("attn_factor", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
                key = f"rope.scaling.{name}"
                if self._key(key, 1.0) != 1.0:
                    raise UnsupportedModelError(f"{self._arch}.{key}", self._key(key), "1.0 or absent")
        return scaling


def llama3_scaling(factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The HF rope_scaling whose frequency factors [H/2] llama.cpp's converter stored.

    Llama 3.1 to 3.3 and their kin all use the bounds 1 and 4; the trained context is found by trying.

    Raises:
      UnsupportedModelError: the factors are of another kind.
    """
    factor = round(float(factors.max()), 4)
    if factors.max() == factors.min() == 1.0:
        return None
    low, high = 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    for original in (8192, *(2**power for power in range(9, 22))):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                    "high_freq_factor": high, "original_max_position_embeddings": original}
    raise UnsupportedModelError(_ROPE_FACTORS, factors.tolist(), "Llama 3's frequency factors")


def _hf_name(name: str) -> str:
    """The HF name of a GGUF tensor; one that is not known keeps its own and is then reported as unexpected."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)) and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{leaf}"
    return name


def _shortest(value: float) -> float:
    """A float32 as the decimal number that its author wrote: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
