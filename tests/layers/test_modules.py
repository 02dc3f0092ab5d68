"""Norm, MLP and attention, each against transformers' module with the same random weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.layers.attention import DenseBatch
from jaxserve.layers.rope import rope_tables
from tests.models.helpers import load, tiny_checkpoint

T = 13
X = jnp.asarray(np.random.default_rng(0).standard_normal((T, 48), np.float32))


def run_reference(module: torch.nn.Module, **kwargs: object) -> np.ndarray:
    with torch.no_grad():
        out = module(torch.from_numpy(np.array(X))[None], **kwargs)
    return (out[0] if isinstance(out, tuple) else out)[0].numpy()


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_norm(family: str) -> None:
    reference, hf = tiny_checkpoint(family)
    layer = load(reference, hf).layers[0]
    np.testing.assert_allclose(layer.input_norm(X), run_reference(reference.model.layers[0].input_layernorm), atol=1e-5)


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_mlp(mlp_bias: bool) -> None:
    reference, hf = tiny_checkpoint("Llama", mlp_bias=mlp_bias)
    layer = load(reference, hf).layers[1]
    np.testing.assert_allclose(layer.mlp(X), run_reference(reference.model.layers[1].mlp), atol=1e-5)


@pytest.mark.parametrize(("family", "options", "window"), [
    ("Llama", {"attention_bias": True}, None),
    ("Llama", {"num_key_value_heads": 1, "head_dim": 20}, None),
    ("Mistral", {"sliding_window": 4}, 4),
    ("Qwen2", {}, None),
    ("Qwen3", {"head_dim": 24}, None),
])
def test_attention(family: str, options: dict, window: int | None) -> None:
    reference, hf = tiny_checkpoint(family, **options)
    model = load(reference, hf)
    config = model.config
    positions = jnp.arange(T, dtype=jnp.int32)
    cos, sin = rope_tables(config.rope, config.head_dim, config.max_position, positions)
    attention = jax.jit(lambda x: model.layers[0].attention(x, cos, sin, None, None, DenseBatch(positions),
                                                            window=window)[0])
    distance = np.arange(T)[:, None] - np.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    expected = run_reference(
        reference.model.layers[0].self_attn,
        position_embeddings=reference.model.rotary_emb(torch.zeros(1), torch.arange(T)[None]),
        attention_mask=torch.where(torch.from_numpy(hidden), float("-inf"), 0.0)[None, None])
    np.testing.assert_allclose(attention(X), expected, atol=1e-4)
