"""The number of KV blocks follows from the memory asked for."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import OutOfMemoryError
from jaxserve.runner.kv_cache import CacheSpec
from jaxserve.runner.memory import num_kv_blocks

SPEC = CacheSpec(num_layers=2, num_blocks=0, block_size=16, num_kv_heads=4, head_dim=8, dtype=jnp.dtype("bfloat16"))
BLOCK_BYTES = 2 * 2 * 16 * 4 * 8 * 2


def count(platform: str = "gpu", total: int = 10**9, weights: int = 10**8, temp: int = 10**7, tp: int = 1,
          **options: Any) -> int:
    config = EngineConfig(**({"max_num_seqs": 256, "max_model_len": 10**6} | options))
    device: Any = SimpleNamespace(platform=platform, memory_stats=lambda: {"bytes_limit": total})
    return num_kv_blocks(config, SPEC, device, tensor_parallel_size=tp, weight_bytes=weights,
                         working_bytes=lambda: temp)


@pytest.fixture(autouse=True)
def jax_has_all_of_the_gpu(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1")


def test_a_gpu_gives_what_weights_and_temporaries_leave():
    assert count(gpu_memory_utilization=0.8) == (8 * 10**8 - 10**8 - 10**7) // BLOCK_BYTES
    assert count(gpu_memory_utilization=0.8, tp=2) == (8 * 10**8 - 10**8 - 10**7) // (BLOCK_BYTES // 2)


def test_the_share_is_of_the_whole_gpu_but_not_more_than_jax_may_use(monkeypatch):
    """`bytes_limit` is what JAX reserved."""
    rest = 10**8 + 10**7
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    assert count(gpu_memory_utilization=0.4) == (10**9 // 2 - rest) // BLOCK_BYTES
    assert count(gpu_memory_utilization=0.9) == (10**9 - rest) // BLOCK_BYTES


@pytest.mark.parametrize(("before", "own", "expected"), [
    ("", None, "0.9"), ("", "0.5", "0.5"), ("jax.devices(); ", None, "None"),
])
def test_jax_reserves_what_the_engine_will_use(before, own, expected):
    program = ("import os, jax; from jaxserve import compat; " + before + "compat.reserve_gpu_memory(0.9); "
               "print(os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION'))")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    environment |= {"JAX_PLATFORMS": "cpu"} | ({"XLA_PYTHON_CLIENT_MEM_FRACTION": own} if own else {})
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_explicit_bytes_and_blocks_win():
    assert count(kv_cache_memory_bytes=10**6) == 10**6 // BLOCK_BYTES
    assert count(kv_cache_memory_bytes=10**6, num_gpu_blocks_override=7) == 7


def test_a_cpu_takes_the_stated_default():
    assert count("cpu") == (1 << 30) // BLOCK_BYTES


def test_never_more_than_can_be_used():
    assert count(max_num_seqs=3, max_model_len=33) == 3 * 3 + 1


def test_too_little_is_said_with_both_numbers():
    with pytest.raises(OutOfMemoryError, match=f"leaves 0 bytes.*need {2 * BLOCK_BYTES}"):
        count(weights=10**9)
    with pytest.raises(OutOfMemoryError, match="kv_cache_memory_bytes=100 leaves 100"):
        count(kv_cache_memory_bytes=100)
