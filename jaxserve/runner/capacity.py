"""What a KV cache of so many bytes holds. Arithmetic only, no jax: the engine and `jaxserve plan` share it."""

from __future__ import annotations

from jaxserve.config import DEFAULT_CPU_KV_CACHE_BYTES, EngineConfig, ModelConfig


def blocks_of(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens of one sequence."""
    return -(-num_tokens // block_size)


def useful_blocks(config: EngineConfig) -> int:
    """More blocks than these can never be in use; the null block is one of them."""
    assert config.max_num_seqs and config.max_model_len, "config is not resolved"
    return config.max_num_seqs * blocks_of(config.max_model_len, config.block_size) + 1


def stated_cache_bytes(config: EngineConfig, platform: str) -> tuple[int, str] | None:
    """Bytes per device for the cache where they are not what other things leave, and what says so."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    return (DEFAULT_CPU_KV_CACHE_BYTES, "the CPU's default KV cache") if platform == "cpu" else None


def num_blocks_in(available_bytes: int, block_bytes: int, config: EngineConfig) -> int:
    """Blocks of a cache in that many bytes, both per device."""
    return min(max(available_bytes, 0) // block_bytes, useful_blocks(config))


def num_host_blocks(config: EngineConfig, block_bytes: int) -> int:
    """Blocks of so many bytes per device that the host memory for them holds."""
    return int(config.swap_space * 2**30) // block_bytes


def token_flops(model: ModelConfig) -> float:
    """To compute one token without attention to the others and without the output head: 2 for each weight it meets."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return 2.0 * model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
