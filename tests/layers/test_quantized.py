"""Decoders with quantised weights, on one device and over ranks; what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import QuantizationConfig
from jaxserve.errors import InvalidInputError, UnsupportedModelError
from jaxserve.layers.fp8 import Fp8Linear
from jaxserve.layers.int4 import Int4Linear
from jaxserve.layers.ranks import SPLIT_AXES
from jaxserve.models.forward import forward
from jaxserve.models.params import abstract_params
from jaxserve.runner.sharding import param_sharding
from jaxserve.targets import get_target
from tests.layers.quantized import CONFIGS, model_config, random_model

TOKENS = jnp.arange(12, dtype=jnp.int32)[None]


@pytest.mark.parametrize(("kind", "weight"), [("int4", "packed"), ("fp8", "weight")])
def test_every_projection_is_quantised_and_counts(kind: str, weight: str) -> None:
    model, run = random_model(model_config(CONFIGS[kind])), jax.jit(forward)
    logits = run(model, TOKENS)
    assert logits.shape == (1, 12, 64) and bool(jnp.isfinite(logits).all())
    layer = model.layers[1]
    for projection in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(projection, {"int4": Int4Linear, "fp8": Fp8Linear}[kind])
        param = getattr(projection, weight)
        kept = param.get_value()
        param.set_value(-kept if kind == "fp8" else jax.lax.bitwise_not(kept))
        assert not np.allclose(run(model, TOKENS), logits, atol=1e-3)
        param.set_value(kept)
    np.testing.assert_array_equal(run(model, TOKENS), logits)


def test_on_several_devices_as_on_one() -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "tests.layers.split"], env=env, cwd=root, check=True)


@pytest.mark.parametrize("quantization", [*CONFIGS.values(), QuantizationConfig(group_size=None)])
def test_each_rank_holds_its_share(quantization: QuantizationConfig) -> None:
    """All but one group of all input features, and what belongs to the outputs of row-parallel projections."""
    mesh = get_target("h200").mesh(4)
    params = abstract_params(model_config(quantization), tensor_parallel_size=4)
    for path, spec in params.items():
        *_, projection, name = path.split(".")
        if projection not in ("qkv", "out", "gate_up", "down"):
            continue
        splits = [axis for axis, by in zip(spec.axes, param_sharding(mesh, spec.shape, spec.axes).spec, strict=True)
                  if by is not None]
        # The axes by which the layer itself cuts the array in shard_map.
        assert splits == [axis for axis in spec.axes if axis in SPLIT_AXES]
        by_output = projection in ("out", "down") and (
            name == "bias" or (name == "scales" and (quantization.kind == "fp8" or quantization.group_size is None)))
        assert len(splits) == (0 if by_output else 1), path


def test_options_are_validated() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(group_size=48), "group_size=48"), (dict(kind="int8"), "kind='int8'.*fp8"),
        (dict(kind="fp8", group_size=64), "group_size=64.*int4"),
        (dict(kind="fp8", symmetric=False), "symmetric=False.*int4"),
    ]
    for options, message in wrong:
        with pytest.raises(UnsupportedModelError, match=message):
            QuantizationConfig(**options)


@pytest.mark.parametrize(("sizes", "message"), [
    (dict(num_heads=4), "tensor_parallel_size=4.*128.*attention's 128"),
    (dict(intermediate_size=768), "tensor_parallel_size=4.*128.*MLP's 768"),
])
def test_blocks_that_ranks_cannot_divide_are_refused(sizes: dict[str, int], message: str) -> None:
    config = model_config(CONFIGS["int4"], **sizes)
    abstract_params(config)
    with pytest.raises(InvalidInputError, match=message):
        abstract_params(config, tensor_parallel_size=4)
    abstract_params(replace(config, quantization=CONFIGS["fp8"]), tensor_parallel_size=4)
