"""How many KV blocks there are, from the memory that may be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh

from jaxserve.compat import gpu_memory_fraction
from jaxserve.config import EngineConfig
from jaxserve.errors import OutOfMemoryError
from jaxserve.models.spec import ParamSpec
from jaxserve.runner.blueprint import Blueprint, abstract_array, with_blocks
from jaxserve.runner.capacity import num_blocks_in, stated_cache_bytes
from jaxserve.runner.kv_cache import CacheSpec, block_bytes


def shard_bytes(leaves: Any) -> int:
    """Per device, of a tree of arrays or abstract arrays with shardings."""
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))


def param_bytes(params: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, int]:
    """Per device, of each parameter."""
    return {path: shard_bytes(abstract_array(spec, mesh)) for path, spec in params.items()}


def temp_bytes(compiled: jax.stages.Compiled) -> int:
    """Per device, what a step takes besides its arguments: temporaries and fresh outputs, by the compiler's account."""
    analysis: Any = compiled.memory_analysis()
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def state_bytes(blueprint: Blueprint) -> int:
    """Per device, of what is kept from step to step besides the KV cache: the sampler's rows, most of all."""
    return shard_bytes((blueprint.state.last_tokens, blueprint.state.sampling))


def working_bytes(blueprint: Blueprint) -> int:
    """Per device, of all that the largest step takes besides weights and cache; compiles it."""
    small = with_blocks(blueprint, 2)
    return temp_bytes(small.lower(small.buckets.mixed[-1]).compile()) + state_bytes(small)


def num_kv_blocks(config: EngineConfig, spec: CacheSpec, device: jax.Device, *, tensor_parallel_size: int,
                  weight_bytes: int, working_bytes: Callable[[], int]) -> int:
    """Blocks of the cache, the null block included.

    Args:
      config: resolved engine options.
      spec: the cache's shape (its num_blocks is not read).
      device: one of the mesh.
      weight_bytes: of the weights, per device.
      working_bytes: see the function of that name; only called if the answer depends on it.

    Raises:
      OutOfMemoryError: not even two blocks fit.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    per_block = block_bytes(spec) // tensor_parallel_size
    available, source = _available_bytes(config, device, weight_bytes, working_bytes)
    num_blocks = num_blocks_in(available, per_block, config)
    if num_blocks < 2:
        raise OutOfMemoryError(f"{source} leaves {available} bytes for the KV cache, but two blocks of "
                               f"{config.block_size} tokens need {2 * per_block}")
    return num_blocks


def _available_bytes(config: EngineConfig, device: jax.Device, weight_bytes: int,
                     working_bytes: Callable[[], int]) -> tuple[int, str]:
    """Bytes per device for the cache, and the option that says so."""
    if (stated := stated_cache_bytes(config, device.platform)) is not None:
        return stated
    pool = device.memory_stats()["bytes_limit"]
    total = int(pool / gpu_memory_fraction())
    budget = min(int(total * config.gpu_memory_utilization), pool)
    source = f"gpu_memory_utilization={config.gpu_memory_utilization} of {total} bytes"
    if budget == pool:
        source += f" (JAX may use {pool})"
    return max(budget - weight_bytes - working_bytes(), 0), source
