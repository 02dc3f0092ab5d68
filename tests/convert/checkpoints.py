"""Tiny checkpoints on disk and what must come out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from convert.load import load_params
from convert.source import open_source
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf
from tests.models.helpers import jaxserve_params
from tests.models.helpers import tiny_checkpoint as make_tiny_checkpoint


def tiny_checkpoint(family: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A random transformers model and its config; untyped, for transformers' methods are not typed."""
    return make_tiny_checkpoint(family, **options)


def save_hf(folder: Path, family: str = "Llama", *, dtype: torch.dtype = torch.float32, max_shard_size: str = "1GB",
            **options: Any) -> dict[str, np.ndarray]:
    """Saves a random model with transformers and returns its weights by HF name, as float32 arrays."""
    model, _ = tiny_checkpoint(family, **options)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}


def load(path: Path, *, tensor_parallel_size: int = 1, dtype: Any = "float32", **options: Any) -> dict[str, jax.Array]:
    source = open_source(path)
    config = model_config_from_hf(source.hf_config)
    expected = abstract_params(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype)
    return load_params(source, config, expected, tensor_parallel_size=tensor_parallel_size, **options)


def expected_params(path: Path, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return jaxserve_params(weights, model_config_from_hf(open_source(path).hf_config))


def assert_same(params: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names and, bit for bit, the same arrays."""
    assert params.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(np.asarray(params[path]), np.asarray(array), err_msg=path, strict=True)
