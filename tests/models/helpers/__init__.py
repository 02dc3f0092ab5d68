"""Tiny random transformers checkpoints and their weights in jaxserve's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from jaxserve.config import ModelConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.params import abstract_params, model_from_params
from jaxserve.models.registry import model_config_from_hf

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def random_model(config: ModelConfig, *, seed: int = 0) -> Decoder:
    """Every parameter random, biases and norms too; made by numpy, for JAX would compile a program per shape."""
    rng = np.random.default_rng(seed)
    params = {path: jnp.asarray(rng.normal("norm" in path, 0.15, spec.shape), spec.dtype)
              for path, spec in abstract_params(config).items()}
    return model_from_params(config, params)


def tiny_checkpoint(family: str, *, seed: int = 0, **options: object) -> tuple[Any, dict]:
    """A float32 transformers model (eager attention) with all parameters random, biases and norms too, and its
    config.json as a dict.

    Args:
      family: "Llama", "Mistral", "Qwen2" or "Qwen3".
      options: config fields on top of `SIZES`.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.ndim == 1 else 0.15)
    return model, {**config.to_diff_dict(), "architectures": [f"{family}ForCausalLM"]}


def load(model: torch.nn.Module, hf: dict, *, tensor_parallel_size: int = 1) -> Decoder:
    """The decoder with the weights of a transformers model (one rank per KV head at most)."""
    config = model_config_from_hf(hf)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    params = {path: jnp.asarray(value) for path, value in jaxserve_params(weights, config).items()}
    return model_from_params(config, params, tensor_parallel_size=tensor_parallel_size)


def jaxserve_params(weights: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """transformers' state dict under jaxserve's paths and shapes."""
    params = {"embed.weight": weights["model.embed_tokens.weight"], "norm.weight": weights["model.norm.weight"]}
    if not config.tie_word_embeddings:
        params["lm_head.weight"] = weights["lm_head.weight"]
    for layer in range(config.num_layers):
        source = {name.removeprefix(f"model.layers.{layer}."): value for name, value in weights.items()
                  if name.startswith(f"model.layers.{layer}.")}
        params |= {f"layers.{layer}.{path}": value for path, value in _layer_params(source, config).items()}
    return params


def _layer_params(source: Mapping[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    groups = config.num_heads // config.num_kv_heads
    params = {"input_norm.weight": source["input_layernorm.weight"],
              "post_attention_norm.weight": source["post_attention_layernorm.weight"]}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in source:
            heads = [source[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
            heads = [x.reshape(config.num_kv_heads, -1, config.head_dim, *x.shape[1:]) for x in heads]
            params[f"attention.qkv.{kind}"] = np.concatenate(heads, axis=1)
        if f"mlp.gate_proj.{kind}" in source:
            params[f"mlp.gate_up.{kind}"] = np.stack([source[f"mlp.{name}_proj.{kind}"] for name in ("gate", "up")])
    out = source["self_attn.o_proj.weight"]
    params["attention.out.weight"] = out.reshape(out.shape[0], config.num_kv_heads, groups, config.head_dim)
    copied = {"self_attn.o_proj.bias": "attention.out.bias", "self_attn.q_norm.weight": "attention.q_norm.weight",
              "self_attn.k_norm.weight": "attention.k_norm.weight", "mlp.down_proj.weight": "mlp.down.weight",
              "mlp.down_proj.bias": "mlp.down.bias"}
    return params | {path: source[name] for name, path in copied.items() if name in source}
