"""How many KV blocks there are, from the memory that may be used."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxserve.config import DEFAULT_CPU_KV_CACHE_BYTES, EngineConfig
from jaxserve.errors import OutOfMemoryError
from jaxserve.runner.kv_cache import CacheSpec, block_bytes


def num_kv_blocks(config: EngineConfig, spec: CacheSpec, device: jax.Device, *, tensor_parallel_size: int,
                  weight_bytes: int, temp_bytes: Callable[[], int]) -> int:
    """Blocks of the cache, the null block included.

    Args:
      config: resolved engine options.
      spec: the cache's shape (its num_blocks is not read).
      device: one of the mesh.
      weight_bytes: of the weights, per device.
      temp_bytes: measures what a step takes besides weights and cache, per device; only called if the answer
        depends on it, since it compiles a step.

    Raises:
      OutOfMemoryError: not even two blocks fit.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    assert config.max_num_seqs and config.max_model_len, "config is not resolved"
    per_block = block_bytes(spec) // tensor_parallel_size
    useful = config.max_num_seqs * -(-config.max_model_len // config.block_size) + 1
    available, source = _available_bytes(config, device, weight_bytes, temp_bytes)
    num_blocks = min(available // per_block, useful)
    if num_blocks < 2:
        raise OutOfMemoryError(f"{source} leaves {available} bytes for the KV cache, but two blocks of "
                               f"{config.block_size} tokens need {2 * per_block}")
    return num_blocks


def _available_bytes(config: EngineConfig, device: jax.Device, weight_bytes: int,
                     temp_bytes: Callable[[], int]) -> tuple[int, str]:
    """Bytes per device for the cache, and the option that says so."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    if device.platform == "cpu":
        return DEFAULT_CPU_KV_CACHE_BYTES, "the CPU's default KV cache"
    total = device.memory_stats()["bytes_limit"]
    budget = int(total * config.gpu_memory_utilization)
    source = f"gpu_memory_utilization={config.gpu_memory_utilization} of {total} bytes"
    return max(budget - weight_bytes - temp_bytes(), 0), source
