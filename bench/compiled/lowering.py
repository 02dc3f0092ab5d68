"""The engine's own step, lowered for a mesh of GPUs that are not there. No weights are made."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import jax
from jax.sharding import Mesh

from jaxserve.config import DType, EngineConfig, ModelConfig
from jaxserve.models.spec import ParamSpec
from jaxserve.runner.blueprint import blueprint
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.kv_cache import CacheSpec
from jaxserve.runner.memory import param_bytes
from jaxserve.runner.sharding import TENSOR


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What of the engine decides a step's program, and the load that the report assumes.

    Attributes:
      batch: sequences of the decode step, and the most that may run.
      tokens: of the mixed step.
      context: tokens of each decoding sequence, this step's included.
      max_model_len: tokens; gives the block tables' width.
    """

    dtype: DType = "bfloat16"
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
        return param_bytes({path: self.params[path]}, self.mesh)[path]

    @property
    def cache_array_bytes(self) -> int:
        """Of one layer's keys, per device."""
        return prod(self.cache.shape) * self.cache.dtype.itemsize // self.mesh.shape[TENSOR]

    def kv_bytes(self, num_tokens: int) -> int:
        """Of one layer's keys of so many tokens, per device."""
        row = self.cache.num_kv_heads * self.cache.head_dim * self.cache.dtype.itemsize
        return num_tokens * row // self.mesh.shape[TENSOR]


def lower_step(kind: Literal["decode", "mixed"], model: ModelConfig, mesh: Mesh, options: StepOptions) -> Step:
    """The step of the whole batch decoding, or of all but one decoding while one prompt fills the rest of the tokens.

    Call it inside `jaxserve.targets.lowering_for`.
    """
    context_lens = [options.context] * options.batch
    if kind == "mixed":
        context_lens[-1] = options.tokens - options.batch + 1
        if context_lens[-1] > options.max_model_len:
            raise ValueError(f"tokens={options.tokens}: the prompt of {context_lens[-1]} tokens would exceed "
                             f"max_model_len={options.max_model_len}")
    config = EngineConfig(dtype=options.dtype, max_num_seqs=options.batch, max_num_batched_tokens=options.tokens,
                          max_model_len=options.max_model_len, block_size=options.block_size)
    steps = blueprint(model, config, mesh, 1 + sum(-(-length // options.block_size) for length in context_lens))
    buckets = steps.buckets
    bucket = buckets.for_decode(options.batch) if kind == "decode" else buckets.for_mixed(options.tokens)
    return Step(model, bucket, mesh, steps.cache, steps.params, context_lens, steps.lower(bucket))
