"""The engine's own step, lowered for a mesh of GPUs that are not there. No weights are made."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.models.params import ParamSpec, abstract_model, abstract_params, split
from jaxserve.models.registry import model_config_from_hf
from jaxserve.runner.batch import BatchLayout
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.kv_cache import CacheSpec, cache_spec
from jaxserve.runner.sharding import TENSOR, param_sharding, replicated
from jaxserve.runner.step import abstract_state, run_step
from pallas_kernels.paged_attention.api import QUERY_TILE

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text(encoding="utf-8"))
"""config.json of well-known models, by name."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What of the engine decides a step's program, and the load that the report assumes.

    Attributes:
      batch: sequences of the decode step, and the most that may run.
      tokens: of the mixed step.
      context: tokens of each decoding sequence, this step's included.
      max_model_len: tokens; gives the block tables' width.
    """

    dtype: str = "bfloat16"
    batch: int = 32
    tokens: int = 2048
    context: int = 1024
    block_size: int = 16
    max_model_len: int = 8192

    def __post_init__(self) -> None:
        for name in ("batch", "tokens", "context", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.tokens < self.batch:
            raise ValueError(f"tokens={self.tokens}: must be at least batch={self.batch}")
        if not 1 <= self.context <= self.max_model_len:
            raise ValueError(f"context={self.context}: must be 1 to max_model_len={self.max_model_len}")


@dataclass(frozen=True)
class Step:
    """A lowered step and what is known of it beforehand.

    Attributes:
      params: path -> spec, in the order of the program's arguments leaves[0], leaves[1], ...
      context_lens: tokens of each sequence that the report assumes, this step's included.
    """

    model: ModelConfig
    bucket: Bucket
    mesh: Mesh
    cache: CacheSpec
    params: dict[str, ParamSpec]
    context_lens: list[int]
    lowered: jax.stages.Lowered

    def param_bytes(self, path: str) -> int:
        """Per device."""
        spec = self.params[path]
        shard = param_sharding(self.mesh, spec.shape, spec.axes).shard_shape(spec.shape)
        return prod(shard) * spec.dtype.itemsize

    @property
    def cache_array_bytes(self) -> int:
        """Of one layer's keys, per device."""
        return prod(self.cache.shape) * self.cache.dtype.itemsize // self.mesh.shape[TENSOR]

    def kv_bytes(self, num_tokens: int) -> int:
        """Of one layer's keys of so many tokens, per device."""
        row = self.cache.num_kv_heads * self.cache.head_dim * self.cache.dtype.itemsize
        return num_tokens * row // self.mesh.shape[TENSOR]


def read_model(name: str, quantization: Literal["int4"] | None = None) -> ModelConfig:
    """From the folder of a checkpoint, its config.json alone, or one of `MODELS`.

    Args:
      quantization: "int4" for projections with 4-bit weights in groups of 128, whatever the checkpoint has.

    Raises:
      ValueError: it is none of these.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if name not in MODELS and not path.is_file():
        raise ValueError(f"model={name!r}: must be a folder with a config.json, or one of {', '.join(MODELS)}")
    hf = MODELS[name] if name in MODELS else json.loads(path.read_text(encoding="utf-8"))
    model = model_config_from_hf(hf)
    return replace(model, quantization=QuantizationConfig()) if quantization else model


def lower_step(kind: Literal["decode", "mixed"], model: ModelConfig, mesh: Mesh, options: StepOptions) -> Step:
    """The step of the whole batch decoding, or of all but one decoding while one prompt fills the rest of the tokens.

    Call it inside `jaxserve.targets.lowering_for`.
    """
    num_ranks = mesh.shape[TENSOR]
    dtype = jnp.dtype(options.dtype)
    graphdef, _, paths = split(abstract_model(model, tensor_parallel_size=num_ranks, dtype=dtype))
    specs = abstract_params(model, tensor_parallel_size=num_ranks, dtype=dtype)
    params = {path: specs[path] for path in paths}
    leaves = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=param_sharding(mesh, spec.shape, spec.axes))
                   for spec in params.values())

    context_lens = [options.context] * options.batch
    if kind == "mixed":
        context_lens[-1] = options.tokens - options.batch + 1
        if context_lens[-1] > options.max_model_len:
            raise ValueError(f"tokens={options.tokens}: the prompt of {context_lens[-1]} tokens would exceed "
                             f"max_model_len={options.max_model_len}")
    buckets = Buckets(max_num_seqs=options.batch, max_num_batched_tokens=options.tokens, query_tile=QUERY_TILE,
                      platform=mesh.devices.flat[0].platform)
    bucket = buckets.for_decode(options.batch) if kind == "decode" else buckets.for_mixed(options.tokens)
    num_blocks = 1 + sum(-(-length // options.block_size) for length in context_lens)
    cache = cache_spec(model, num_blocks=num_blocks, block_size=options.block_size, tensor_parallel_size=num_ranks,
                       dtype=options.dtype)
    state = abstract_state(cache, options.batch, model.vocab_size, mesh)

    layout = BatchLayout(bucket, -(-(options.max_model_len + 1) // options.block_size))
    num_ints, num_floats = layout.sizes()
    whole = replicated(mesh)
    ints = jax.ShapeDtypeStruct((num_ints,), jnp.int32, sharding=whole)
    floats = jax.ShapeDtypeStruct((num_floats,), jnp.float32, sharding=whole)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state), whole

    def step(leaves: Any, state: Any, ints: Any, floats: Any) -> Any:  # arguments keep these names in the compiled text
        return run_step(graphdef, layout, mesh, leaves, state, ints, floats)

    jitted: Any = jax.jit(step, donate_argnums=1, out_shardings=shardings)
    lowered = jitted.lower(leaves, state, ints, floats)
    return Step(model, bucket, mesh, cache, params, context_lens, lowered)
