"""The table of names covers every parameter of every family, both ways."""

from __future__ import annotations

import pytest

from convert.rules import RULES, tensors_of, unexpected
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf
from tests.models.helpers import tiny_checkpoint


@pytest.mark.parametrize(("family", "options"), [
    ("Llama", {"attention_bias": True, "mlp_bias": True}), ("Llama", {"tie_word_embeddings": True}), ("Mistral", {}),
    ("Qwen2", {}), ("Qwen3", {"head_dim": 16}),
])
def test_every_parameter_and_every_tensor_has_its_place(family: str, options: dict) -> None:
    model, hf = tiny_checkpoint(family, **options)
    config = model_config_from_hf(hf)
    wanted = [name for path in abstract_params(config) for name, _ in tensors_of(path)]
    assert len(wanted) == len(set(wanted))
    assert set(wanted) == {name for name, _ in model.named_parameters()}  # shared ones once
    assert unexpected(model.state_dict(), wanted, config) == []


def test_unknown_paths_and_names() -> None:
    _, hf = tiny_checkpoint("Llama")
    assert tensors_of("layers.0.attention.nonesuch.weight") == [] and tensors_of("layers.x.input_norm.weight") == []
    names = ["model.norm.weight", "model.layers.0.attn.rotary_emb.inv_freq", "model.layers.0.foo", "lm_head.weight"]
    config = model_config_from_hf(hf)
    assert unexpected(names, ["model.norm.weight"], config) == ["lm_head.weight", "model.layers.0.foo"]
    assert len({rule.hf for rule in RULES}) == len(RULES)
