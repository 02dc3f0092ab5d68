"""From a model's name and options to what is to be compiled."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig, MeshConfig, ModelConfig
from jaxserve.errors import InvalidInputError, OutOfMemoryError
from jaxserve.executables.build import LOCAL, Job
from jaxserve.planning.known import read_model
from jaxserve.planning.measure import Request
from jaxserve.planning.planner import plan_of
from jaxserve.runner.capacity import num_blocks_in, stated_cache_bytes
from jaxserve.targets.target import TARGETS

logger = logging.getLogger(__name__)

_SLACK = 0.02
"""Share of a card's memory that is left free: cards of a kind differ a little in what they report."""


def make_job(model: str | Path | None, *, target: str, quantization: str | None = None,
             tensor_parallel_size: int = 1, autotune_results: Path | None = None,
             save_autotune_results: Path | None = None, **options: Any) -> Job:
    """
    Args:
      model: as for `planning.read_model`; None: the packaged SmolLM2.
      target: a card, "cpu", or "local" for this machine's own devices.
      options: of `EngineConfig`.

    Raises:
      InvalidInputError: an option is wrong.
      OutOfMemoryError: the model does not fit on the card.
    """
    target = target.lower()
    if target not in (*TARGETS, "cpu", LOCAL):
        raise InvalidInputError("target", target, f"one of {', '.join(TARGETS)}, cpu or {LOCAL}")
    if model is None:
        from convert.packaged import packaged_smollm2

        model = packaged_smollm2()
    read = read_model(model, quantization)
    if read.quantization is not None:
        logger.warning("the engine does not load 4-bit or fp8 checkpoints yet: nothing can use these programs")
    config = EngineConfig(mesh=MeshConfig(tensor=tensor_parallel_size), **options)
    platform = _platform(target)
    config = config.resolve(read, platform)
    xla = _autotuning(target, platform, autotune_results, save_autotune_results)
    num_blocks = _num_blocks(read, config, target, platform, tensor_parallel_size)
    config = replace(config, mesh=MeshConfig(), kv_cache_memory_bytes=None, num_gpu_blocks_override=None)
    return Job(read, config, num_blocks, target, tensor_parallel_size, xla)


def _platform(target: str) -> str:
    if target != LOCAL:
        return "cpu" if target == "cpu" else "gpu"
    import jax

    return jax.devices()[0].platform


def _num_blocks(model: ModelConfig, config: EngineConfig, target: str, platform: str, ranks: int) -> int:
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if (stated := stated_cache_bytes(config, platform)) is not None:
        from jaxserve.runner.kv_cache import block_bytes, cache_dtype, cache_spec

        spec = cache_spec(model, num_blocks=2, block_size=config.block_size, tensor_parallel_size=ranks,
                          dtype=cache_dtype(config))
        available, _ = stated
        num_blocks = num_blocks_in(available, block_bytes(spec) // ranks, config)
    elif target == LOCAL:
        raise InvalidInputError("kv_cache_memory_bytes", None, "a number of bytes, with target=local on a GPU")
    else:
        found = plan_of(Request(model, config, target, ranks))
        available = found.cache_room_bytes - int(_SLACK * found.target.memory_bytes)
        num_blocks = num_blocks_in(available, found.step.block, config)
    if num_blocks < 2:
        advice = "; jaxserve plan says what would help" if target in TARGETS else ""
        raise OutOfMemoryError(f"no room for a KV cache on {target}: {available} bytes are left{advice}")
    return num_blocks


def _autotuning(target: str, platform: str, load: Path | None, save: Path | None) -> tuple[tuple[str, Any], ...]:
    """XLA's options. Without results Triton's GEMMs would get tiles that nobody chose, so they are cuBLASLt's."""
    options: dict[str, Any] = {}
    if (load or save) and platform != "gpu":
        raise InvalidInputError("autotune_results" if load else "save_autotune_results", str(load or save),
                                f"only for GPUs, and target is {target}")
    if save is not None:
        if target != LOCAL:
            raise InvalidInputError("save_autotune_results", str(save), f"only with target={LOCAL}: it times kernels")
        options |= {"xla_gpu_dump_autotune_results_to": str(save.resolve())}
    if load is not None:
        if not load.is_file():
            raise InvalidInputError("autotune_results", str(load), "a file that XLA wrote")
        options |= {"xla_gpu_load_autotune_results_from": str(load.resolve()), "xla_gpu_enable_triton_gemm": True,
                    "xla_gpu_require_complete_aot_autotune_results": True}
    return tuple(sorted(options.items()))
