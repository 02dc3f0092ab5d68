"""Whole-model parity with transformers on tiny random checkpoints: every family and every option."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve.models.forward import forward
from tests.models.helpers import load, tiny_checkpoint

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 5}

CASES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "llama llama3": ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "llama attention_bias": ("Llama", {"attention_bias": True}),
    "llama mlp_bias": ("Llama", {"mlp_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 5}),
    "mistral head_dim": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 max_window_layers": ("Qwen2", {**QWEN_WINDOWS, "max_window_layers": 1}),
    "qwen2 layer_types": ("Qwen2", {**QWEN_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied bias": ("Qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 window yarn": ("Qwen3", {**QWEN_WINDOWS, "head_dim": 16, "max_window_layers": 1,
                                    "rope_parameters": {**YARN, "rope_theta": 1e6}}),
    **{f"gqa {heads // kv_heads}": ("Llama", {"num_attention_heads": heads, "num_key_value_heads": kv_heads,
                                             "head_dim": 8})
       for heads, kv_heads in ((2, 2), (6, 3), (9, 3), (8, 2), (8, 1))},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    family, options = CASES[case]
    if case.startswith("gqa"):
        options = {**options, "hidden_size": 8 * options["num_attention_heads"]}
    reference, hf = tiny_checkpoint(family, **options)
    token_ids = np.random.default_rng(1).integers(0, 97, (2, 23))
    with torch.no_grad():
        expected = reference(torch.from_numpy(token_ids)).logits.numpy()
    logits = jax.jit(forward)(load(reference, hf), jnp.asarray(token_ids, jnp.int32))
    assert np.abs(expected).max() > 1  # the weights are large enough for the comparison to mean something
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
