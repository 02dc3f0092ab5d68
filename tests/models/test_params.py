"""The parameter tree: paths, shapes and axes, and taking a model apart and putting it together again."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ModelConfig, RopeConfig
from jaxserve.errors import CheckpointError, InvalidInputError
from jaxserve.models.forward import forward
from jaxserve.models.params import abstract_params, flatten, merge, model_from_params, split
from tests.models.helpers import random_model

CONFIG = ModelConfig(architecture="Qwen3ForCausalLM", vocab_size=96, hidden_size=48, intermediate_size=80,
                     num_layers=12, num_heads=8, num_kv_heads=2, head_dim=16, max_position=64, rms_norm_eps=1e-6,
                     rope=RopeConfig(), attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True)
LAYER = {
    "input_norm.weight": ((48,), ("embed",)),
    "attention.qkv.weight": ((2, 6, 16, 48), ("kv_heads", None, "head", "embed")),
    "attention.qkv.bias": ((2, 6, 16), ("kv_heads", None, "head")),
    "attention.q_norm.weight": ((16,), ("head",)),
    "attention.k_norm.weight": ((16,), ("head",)),
    "attention.out.weight": ((48, 2, 4, 16), ("embed", "kv_heads", None, "head")),
    "attention.out.bias": ((48,), ("embed",)),
    "post_attention_norm.weight": ((48,), ("embed",)),
    "mlp.gate_up.weight": ((2, 80, 48), (None, "mlp", "embed")),
    "mlp.gate_up.bias": ((2, 80), (None, "mlp")),
    "mlp.down.weight": ((48, 80), ("embed", "mlp")),
    "mlp.down.bias": ((48,), ("embed",)),
}
TOP = {"embed.weight": ((96, 48), (None, "table_width")), "norm.weight": ((48,), ("embed",)),
       "lm_head.weight": ((96, 48), ("vocab", "embed"))}


def test_tree() -> None:
    specs = abstract_params(CONFIG, dtype=jnp.bfloat16)
    expected = TOP | {f"layers.{layer}.{path}": spec for layer in range(12) for path, spec in LAYER.items()}
    assert {path: (spec.shape, spec.axes) for path, spec in specs.items()} == expected
    assert {spec.dtype for spec in specs.values()} == {jnp.dtype("bfloat16")}


def test_options_remove_parameters() -> None:
    plain = replace(CONFIG, attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False,
                    tie_word_embeddings=True)
    gone = set(abstract_params(CONFIG)) - set(abstract_params(plain))
    assert {path.removeprefix("layers.0.") for path in gone if not path.startswith("layers.") or ".0." in path} == {
        "lm_head.weight", "attention.qkv.bias", "attention.out.bias", "mlp.gate_up.bias", "mlp.down.bias",
        "attention.q_norm.weight", "attention.k_norm.weight"}


def test_more_ranks_than_kv_heads() -> None:
    specs = abstract_params(CONFIG, tensor_parallel_size=4)
    assert specs["layers.3.attention.qkv.weight"].shape == (4, 4, 16, 48)
    assert specs["layers.3.attention.out.weight"].shape == (48, 4, 2, 16)


def test_what_the_ranks_do_not_divide() -> None:
    odd = abstract_params(replace(CONFIG, vocab_size=97), tensor_parallel_size=2)
    assert odd["lm_head.weight"].axes == (None, "embed")
    tied = abstract_params(replace(CONFIG, vocab_size=97, tie_word_embeddings=True), tensor_parallel_size=2)
    assert tied["embed.weight"].axes == (None, "embed")
    with pytest.raises(InvalidInputError, match="MLP width 80"):
        abstract_params(replace(CONFIG, num_heads=96), tensor_parallel_size=32)
    with pytest.raises(InvalidInputError, match="query heads"):
        abstract_params(CONFIG, tensor_parallel_size=5)


def test_split_and_merge() -> None:
    model = random_model(CONFIG)
    graphdef, leaves, paths = split(model)
    assert paths == tuple(abstract_params(CONFIG)) and len(leaves) == len(paths)
    assert paths[paths.index("layers.1.attention.k_norm.weight") + len(LAYER)] == "layers.2.attention.k_norm.weight"
    again_def, again_leaves, _ = split(merge(graphdef, leaves))
    assert again_def == graphdef and hash(again_def) == hash(graphdef)
    assert all(a is b for a, b in zip(leaves, again_leaves, strict=True))


def test_flat_leaves_across_the_jit_boundary() -> None:
    config = replace(CONFIG, num_layers=2, layer_windows=())
    model, token_ids = random_model(config), jnp.arange(6, dtype=jnp.int32)[None]
    graphdef, leaves, _ = split(model)
    inside = jax.jit(lambda leaves: forward(merge(graphdef, leaves), token_ids))(leaves)
    np.testing.assert_allclose(inside, jax.jit(forward)(model, token_ids), atol=1e-5)


def test_model_from_params_names_every_problem() -> None:
    params = flatten(random_model(CONFIG))
    model_from_params(CONFIG, params)
    del params["norm.weight"]
    params |= {"extra": jnp.zeros(1), "embed.weight": jnp.zeros((95, 48)),
               "lm_head.weight": params["lm_head.weight"].astype(jnp.bfloat16)}
    with pytest.raises(CheckpointError) as refusal:
        model_from_params(CONFIG, params)
    for problem in ("norm.weight is missing", "extra is unexpected", "embed.weight is float32[95, 48]",
                    "lm_head.weight is bfloat16[96, 48], expected float32[96, 48]"):
        assert problem in str(refusal.value)


@pytest.mark.parametrize(("windows", "num_functions"), [((None,) * 12, 1), ((None, 8) * 6, 2)])
def test_alike_layers_share_one_lowered_function(windows: tuple, num_functions: int) -> None:
    config = replace(CONFIG, layer_windows=windows)
    graphdef, leaves, _ = split(random_model(config))
    text = jax.jit(lambda leaves, ids: forward(merge(graphdef, leaves), ids)).lower(
        leaves, jax.ShapeDtypeStruct((1, 8), jnp.int32)).as_text()
    assert text.count("func.func private @_apply_layer") == num_functions
    assert text.count("call @_apply_layer") == 12
