"""RoPE frequencies and tables against transformers' own, for every kind."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jaxserve.config import ModelConfig
from jaxserve.layers.rope import rope_frequencies, rope_tables
from jaxserve.models.registry import model_config_from_hf
from pallas_kernels.rope_kv_write import rotate

MAX_POSITION = 4096
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 512, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
CASES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "theta 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": LLAMA3,
    "llama3 narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "factor": 32.0},
    "yarn": YARN,
    "yarn factor from the context": {**YARN, "factor": None},
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn attention_factor": {**YARN, "attention_factor": 1.25},
    "yarn untruncated": {**YARN, "truncate": False},
}


def make_rope(parameters: dict, **options: object) -> tuple[LlamaRotaryEmbedding, ModelConfig]:
    """transformers' module and our config of the same options."""
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 256, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 4, "max_position_embeddings": MAX_POSITION, **options}
    config = LlamaConfig(**sizes, rope_parameters=dict(parameters))
    hf = {**sizes, "architectures": ["LlamaForCausalLM"], "rope_parameters": parameters}
    return LlamaRotaryEmbedding(config), model_config_from_hf(hf)


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case: str, head_dim: int) -> None:
    reference, config = make_rope(CASES[case], head_dim=head_dim)
    frequencies, factor = rope_frequencies(config.rope, config.head_dim, config.max_position)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=3e-7)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers(case: str) -> None:
    reference, config = make_rope(CASES[case])
    positions = np.r_[0:40, 500:520, 4000:4096]
    cos, sin = rope_tables(config.rope, config.head_dim, config.max_position, jnp.asarray(positions, jnp.int32))
    expected_cos, expected_sin = reference(torch.zeros(1), torch.from_numpy(positions)[None])
    # An angle of up to 4096 radians has an ulp of 5e-4 in float32: one rounding apart is as close as can be asked for.
    np.testing.assert_allclose(cos, expected_cos[0, :, :32].numpy(), atol=6e-4)
    np.testing.assert_allclose(sin, expected_sin[0, :, :32].numpy(), atol=6e-4)
    np.testing.assert_allclose(cos[:40], expected_cos[0, :40, :32].numpy(), atol=5e-6)


def test_rotation_equals_transformers() -> None:
    reference, config = make_rope(CASES["default"])
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((9, 2, 3, 64), np.float32), rng.standard_normal((9, 2, 64), np.float32)
    cos, sin = reference(torch.zeros(1), torch.arange(9)[None])
    expected_q, expected_k = apply_rotary_pos_emb(
        torch.from_numpy(q.reshape(9, 6, 64)).transpose(0, 1)[None], torch.from_numpy(k).transpose(0, 1)[None],
        cos, sin)
    tables = rope_tables(config.rope, 64, config.max_position, jnp.arange(9, dtype=jnp.int32))
    np.testing.assert_allclose(rotate(jnp.asarray(q), *tables).reshape(9, 6, 64),
                               expected_q[0].transpose(0, 1).numpy(), atol=1e-5)
    np.testing.assert_allclose(rotate(jnp.asarray(k), *tables), expected_k[0].transpose(0, 1).numpy(), atol=1e-5)


def test_dynamic_at_the_longest_length_equals_transformers() -> None:
    """A model that serves 3 times its trained context rotates like transformers at exactly that length."""
    reference, config = make_rope(CASES["dynamic"])
    longest = 3 * MAX_POSITION
    reference(torch.zeros(1), torch.arange(longest)[None])
    frequencies, _ = rope_frequencies(config.rope, config.head_dim, longest)
    np.testing.assert_allclose(frequencies, reference.inv_freq.numpy(), rtol=3e-7)
    plain, _ = rope_frequencies(config.rope, config.head_dim, MAX_POSITION)
    assert np.all(frequencies[1:] < plain[1:])


def test_rotation_keeps_bfloat16_but_computes_in_float32() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 2, 64)), jnp.bfloat16)
    _, config = make_rope(CASES["default"])
    tables = rope_tables(config.rope, 64, config.max_position, jnp.arange(5, dtype=jnp.int32))
    rotated = rotate(x, *tables)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, rotate(x.astype(jnp.float32), *tables).astype(jnp.bfloat16))
