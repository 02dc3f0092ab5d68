"""All that decides an engine's programs, before there are weights or even devices: for the engine that will run them,
and for planning and compiling ahead on another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.models.spec import ParamSpec
from jaxserve.runner.batch import BatchLayout
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.kv_cache import CacheSpec, cache_dtype, cache_spec
from jaxserve.runner.sharding import TENSOR, param_sharding, replicated
from jaxserve.runner.state import DeviceState, abstract_state, output_tree
from pallas_kernels.paged_attention.api import QUERY_TILE


@dataclass(frozen=True)
class Blueprint:
    """An engine's steps in the abstract.

    Attributes:
      config: resolved options.
      mesh: of devices, or of a target's that are not there.
      params: dotted path -> spec, in the order of `leaves`.
      leaves: the weights, abstract.
      state: what lives on the device from step to step, abstract.
    """

    model: ModelConfig
    config: EngineConfig
    mesh: Mesh
    cache: CacheSpec
    params: dict[str, ParamSpec]
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    state: DeviceState
    buckets: Buckets

    def layout(self, bucket: Bucket) -> BatchLayout:
        return BatchLayout(bucket, blocks_per_seq(self.config))

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """The bucket's step, traced. For a mesh of devices that are not there: inside `targets.lowering_for`."""
        from jaxserve.runner.step import run_step

        layout = self.layout(bucket)

        def step(leaves: Any, state: Any, ints: Any, floats: Any) -> Any:  # the compiled text keeps these names
            return run_step(self.decoder, layout, self.mesh, leaves, state, ints, floats)

        # The state must come back as it went in, or the next step would not take it.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state), replicated(self.mesh)
        jitted: Any = jax.jit(step, donate_argnums=1, out_shardings=shardings)
        return jitted.lower(*self.arguments(bucket))

    def decoder(self, leaves: Sequence[Any]) -> Any:
        """The model with these in place of `leaves`; inside a trace."""
        # Not at the top: flax and all layers are imported for it, which an engine that loads its steps can do without.
        from jaxserve.models.params import abstract_model, merge, split

        graphdef, _, _ = split(abstract_model(self.model, tensor_parallel_size=self.mesh.shape[TENSOR],
                                              dtype=self.config.dtype))
        return merge(graphdef, leaves)

    def arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        """Abstract arguments of the bucket's program."""
        whole = replicated(self.mesh)
        num_ints, num_floats = self.layout(bucket).sizes()
        return (self.leaves, self.state, jax.ShapeDtypeStruct((num_ints,), jnp.int32, sharding=whole),
                jax.ShapeDtypeStruct((num_floats,), jnp.float32, sharding=whole))

    def trees(self, bucket: Bucket) -> tuple[PyTreeDef, PyTreeDef]:
        """Structure of what the bucket's program takes, positional and keyword arguments, and of what it returns."""
        return jax.tree.structure((self.arguments(bucket), {})), output_tree(self.state, bucket)


def blueprint(model: ModelConfig, config: EngineConfig, mesh: Mesh, num_blocks: int = 2,
              params: Mapping[str, ParamSpec] | None = None) -> Blueprint:
    """Of an engine with these resolved options and so many KV blocks.

    Args:
      params: `abstract_params` of the model, if they are known.
    """
    assert config.max_num_seqs and config.max_num_batched_tokens, "config is not resolved"
    if params is None:
        from jaxserve.models.params import abstract_params

        params = abstract_params(model, tensor_parallel_size=mesh.shape[TENSOR], dtype=jnp.dtype(config.dtype))
    leaves = tuple(abstract_array(spec, mesh) for spec in params.values())
    buckets = Buckets(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
                      query_tile=QUERY_TILE, platform=mesh.devices.flat[0].platform)
    cache = cache_spec(model, num_blocks=num_blocks, block_size=config.block_size,
                       tensor_parallel_size=mesh.shape[TENSOR], dtype=cache_dtype(config))
    state = abstract_state(cache, config.max_num_seqs, model.vocab_size, mesh)
    return Blueprint(model, config, mesh, cache, dict(params), leaves, state, buckets)


def abstract_array(spec: ParamSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A parameter as it lies on the mesh."""
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=param_sharding(mesh, spec.shape, spec.axes))


def with_blocks(made: Blueprint, num_blocks: int) -> Blueprint:
    """The same engine with a KV cache of another size."""
    assert made.config.max_num_seqs
    cache = replace(made.cache, num_blocks=num_blocks)
    return replace(made, cache=cache,
                   state=abstract_state(cache, made.config.max_num_seqs, made.model.vocab_size, made.mesh))


def blocks_per_seq(config: EngineConfig) -> int:
    """Columns of the block tables: a sequence of max_model_len tokens, and the one that is sampled last."""
    assert config.max_model_len is not None, "config is not resolved"
    return -(-(config.max_model_len + 1) // config.block_size)
