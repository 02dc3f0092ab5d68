"""The decoder over whole sequences: batches, packing, repeated KV heads, dtypes, and training."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.models.decoder import Decoder
from jaxserve.models.forward import forward as traced_forward
from jaxserve.models.params import flatten, model_from_params
from tests.models.helpers import random_model

forward = jax.jit(traced_forward)

CONFIG = ModelConfig(architecture="LlamaForCausalLM", vocab_size=61, hidden_size=32, intermediate_size=64, num_layers=2,
                     num_heads=4, num_kv_heads=2, head_dim=8, max_position=64, rms_norm_eps=1e-6, rope=RopeConfig(),
                     attention_bias=True, layer_windows=(None, 4))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 61, (3, 12)), jnp.int32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_model(CONFIG)


def test_sequences_of_a_batch_do_not_meet(model: Decoder) -> None:
    logits = forward(model, TOKENS)
    assert logits.shape == (3, 12, 61) and logits.dtype == jnp.float32
    for row in range(3):
        np.testing.assert_allclose(logits[row], forward(model, TOKENS[row:row + 1])[0], atol=1e-5)


def test_what_comes_later_changes_nothing(model: Decoder) -> None:
    changed = TOKENS.at[:, 8:].set(0)
    np.testing.assert_allclose(forward(model, TOKENS)[:, :8], forward(model, changed)[:, :8], atol=1e-5)


def test_packed_segments_equal_separate_sequences(model: Decoder) -> None:
    packed = jnp.concatenate([TOKENS[0, :5], TOKENS[1, :7]])[None]
    positions = jnp.asarray([[*range(5), *range(7)]], jnp.int32)
    segment_ids = jnp.asarray([[0] * 5 + [1] * 7], jnp.int32)
    logits = forward(model, packed, positions=positions, segment_ids=segment_ids)[0]
    np.testing.assert_allclose(logits[:5], forward(model, TOKENS[:1, :5])[0], atol=1e-5)
    np.testing.assert_allclose(logits[5:], forward(model, TOKENS[1:2, :7])[0], atol=1e-5)


def test_repeated_kv_heads_give_the_same_logits(model: Decoder) -> None:
    """With 4 ranks and 2 KV heads, every rank stores a copy of the key and value head that its query heads use."""
    params = flatten(model)
    for layer in range(CONFIG.num_layers):
        for kind in ("weight", "bias"):
            qkv = params[f"layers.{layer}.attention.qkv.{kind}"]
            q = qkv[:, :2].reshape(4, 1, *qkv.shape[2:])
            kv = jnp.repeat(qkv[:, 2:], 2, axis=0)
            params[f"layers.{layer}.attention.qkv.{kind}"] = jnp.concatenate([q, kv], axis=1)
        out = params[f"layers.{layer}.attention.out.weight"]
        params[f"layers.{layer}.attention.out.weight"] = out.reshape(32, 4, 1, 8)
    wide = model_from_params(CONFIG, params, tensor_parallel_size=4)
    np.testing.assert_allclose(forward(wide, TOKENS), forward(model, TOKENS), atol=1e-5)


def test_bfloat16_stays_near_float32(model: Decoder) -> None:
    half = {path: value.astype(jnp.bfloat16) for path, value in flatten(model).items()}
    narrow = forward(model_from_params(CONFIG, half, dtype=jnp.bfloat16), TOKENS)
    wide = forward(model_from_params(CONFIG, {path: value.astype(jnp.float32) for path, value in half.items()}), TOKENS)
    assert narrow.dtype == jnp.float32
    assert jnp.linalg.norm(narrow - wide) < 0.03 * jnp.linalg.norm(wide)


@jax.jit
def loss(model: Decoder) -> jax.Array:
    log_probs = jax.nn.log_softmax(traced_forward(model, TOKENS[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], axis=-1))


def test_one_sgd_step_lowers_the_loss(model: Decoder) -> None:
    before, gradient = nnx.jit(nnx.value_and_grad(loss))(model)
    after = loss(jax.tree.map(lambda value, slope: value - 0.01 * slope, model, _as_model(gradient, model)))
    assert after < before - 1e-3


def test_gradient_equals_a_finite_difference(model: Decoder) -> None:
    slopes = flatten(_as_model(nnx.jit(nnx.grad(loss))(model), model))
    for path in ("embed.weight", "layers.0.attention.qkv.weight", "layers.1.attention.qkv.bias", "norm.weight"):
        direction = np.random.default_rng(2).standard_normal(slopes[path].shape, np.float32)
        direction /= np.linalg.norm(direction)

        def shifted(step: float, path: str = path, direction: np.ndarray = direction) -> float:
            params = flatten(model)
            return float(loss(model_from_params(CONFIG, {**params, path: params[path] + step * direction})))

        expected = (shifted(1e-2) - shifted(-1e-2)) / 2e-2
        assert float(jnp.sum(slopes[path] * direction)) == pytest.approx(expected, abs=2e-3, rel=2e-2)


def _as_model(state: nnx.State, model: Decoder) -> Decoder:
    return jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(state))


def test_untied_head_and_windows_are_read_from_the_config(model: Decoder) -> None:
    unwindowed = model_from_params(replace(CONFIG, layer_windows=(None, None)), flatten(model))
    full, windowed = forward(unwindowed, TOKENS), forward(model, TOKENS)
    np.testing.assert_allclose(full[:, :4], windowed[:, :4], atol=1e-5)
    assert jnp.abs(full[:, 5:] - windowed[:, 5:]).max() > 1e-3
