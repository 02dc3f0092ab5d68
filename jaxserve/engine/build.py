"""From a model's path and options to a running engine."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from convert.load import from_named, load_params
from convert.packaged import packaged_smollm2
from convert.source import Source, open_source
from jaxserve import compat
from jaxserve.config import EngineConfig, MeshConfig, ModelConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.inputs import InputProcessor
from jaxserve.engine.weights import as_params
from jaxserve.errors import CheckpointError, InvalidInputError
from jaxserve.executables import ahead
from jaxserve.executables.load import Executables
from jaxserve.models.registry import model_config_from_hf
from jaxserve.request import SamplingParams
from jaxserve.runner.block_mover import STAGING_BLOCKS, BlockMover
from jaxserve.runner.blueprint import Blueprint, blocks_per_seq, blueprint, with_blocks
from jaxserve.runner.capacity import num_host_blocks, token_flops
from jaxserve.runner.kv_cache import block_bytes
from jaxserve.runner.memory import num_kv_blocks, shard_bytes, working_bytes
from jaxserve.runner.model_runner import ModelRunner
from jaxserve.runner.programs import Programs
from jaxserve.runner.sharding import TENSOR, make_mesh
from jaxserve.scheduling.host_tier import HostMemory
from jaxserve.scheduling.limits import BatchDelay, PrefillLimits
from jaxserve.scheduling.move_costs import RATES, MoveCosts
from jaxserve.scheduling.ngram import NgramDrafter
from jaxserve.scheduling.report import MemoryProfiler
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.text import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """An engine and what belongs to it; `LLM` and `AsyncLLM` are faces of one.

    Attributes:
      config: the resolved options.
      default_sampling: what the checkpoint's generation config suggests.
    """

    engine: Engine
    inputs: InputProcessor
    tokenizer: Tokenizer | None
    model: ModelConfig
    config: EngineConfig
    default_sampling: SamplingParams

    def update_weights(self, params: Any) -> None:
        """See `LLM.update_weights`."""
        current = self.engine.runner.params()

        def from_hf_names(named: Mapping[str, Any]) -> dict[str, jax.Array]:
            steps = self.engine.runner.blueprint
            return from_named(named, self.model, steps.params, tensor_parallel_size=steps.mesh.shape[TENSOR],
                              shardings={path: array.sharding for path, array in current.items()})

        self.engine.update_weights(as_params(params, current, from_hf_names))


def engine_config(**options: Any) -> EngineConfig:
    """Engine options by name; `tensor_parallel_size=n` is short for `mesh=MeshConfig(tensor=n)`.

    Raises:
      InvalidInputError: an option is unknown, wrong, or contradicts another.
    """
    tensor_parallel_size = options.pop("tensor_parallel_size", None)
    if options.get("mesh") is None:
        options.pop("mesh", None)
    if tensor_parallel_size is not None:
        mesh = options.setdefault("mesh", MeshConfig(tensor=tensor_parallel_size))
        size = mesh.tensor if isinstance(mesh, MeshConfig) else mesh.shape.get(TENSOR)
        if size != tensor_parallel_size:
            raise InvalidInputError("tensor_parallel_size", tensor_parallel_size, f"{size}, as mesh says, or left out")
    known = EngineConfig.__dataclass_fields__
    for name, value in options.items():
        if name not in known:
            raise InvalidInputError(name, value, f"no such engine option; there are {', '.join(sorted(known))}")
    return EngineConfig(**options)


def build(model: str | None = None, *, tokenizer: str | None = None, skip_tokenizer_init: bool = False,
          **options: Any) -> Serving:
    """Loads a model and makes an engine for it.

    Args:
      model: a folder or GGUF file; None: the packaged SmolLM2-135M-Instruct.
      tokenizer: folder of another tokenizer than the model's own.
      skip_tokenizer_init: prompts are token ids only.
      options: see `EngineConfig`.

    Raises:
      JaxserveError: what is wrong with model or options.
    """
    config = engine_config(**options)
    if model is not None and (not isinstance(model, (str, os.PathLike)) or not str(model)):
        raise InvalidInputError("model", model, "a folder, a GGUF file, or None")
    if skip_tokenizer_init and tokenizer is not None:
        raise InvalidInputError("tokenizer", tokenizer, "None with skip_tokenizer_init=True")
    start = time.monotonic()
    source = open_source(packaged_smollm2() if model is None else model)
    model_config = model_config_from_hf(source.hf_config)
    compat.reserve_gpu_memory(config.gpu_memory_utilization)
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    steps, executables = _steps(config, model_config, mesh)
    config = steps.config
    compat.use_compilation_cache(config.compilation_cache_dir, device.platform)
    programs = None if executables is None else _loading(steps, executables)
    params = _load(source, steps)
    text = None if skip_tokenizer_init else _tokenizer(source, tokenizer)
    logger.info("loaded %s in %.1f s", source.name, time.monotonic() - start)
    engine = make_engine(steps, params, text, programs)
    assert config.max_model_len is not None
    inputs = InputProcessor(text, vocab_size=model_config.vocab_size, max_model_len=config.max_model_len,
                            capacity_tokens=engine.scheduler.capacity_tokens, seed=config.seed,
                            eos_token_ids=_eos_token_ids(source, text))
    return Serving(engine, inputs, text, model_config, config, _default_sampling(source.generation_config))


def make_engine(steps: Blueprint, params: Mapping[str, jax.Array], tokenizer: Tokenizer | None,
                programs: Programs | None = None) -> Engine:
    """An engine for parameters that are on the mesh already.

    Args:
      steps: with any number of KV blocks.
      programs: of these steps, if some are being made already; then the KV blocks are counted.
    """
    steps, config = _with_cache(steps) if programs is None else steps, steps.config
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len, "config is not resolved"
    sample = _sample_tokens(tokenizer, steps) if steps.cache.has_scales else []
    scheduler = Scheduler(num_blocks=steps.cache.num_blocks, block_size=config.block_size,
                          max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
                          max_blocks_per_seq=blocks_per_seq(config),
                          enable_prefix_caching=config.enable_prefix_caching, policy=config.scheduling_policy,
                          priority_weights=config.priority_weights, prefill_limits=_prefill_limits(config),
                          host_memory=_host_memory(steps),
                          drafter=_drafter(config))
    runner = ModelRunner(steps, params, scheduler.block_tables, programs, sample,
                         None if scheduler.host is None else BlockMover(steps, compress=config.swap_compression))
    return Engine(scheduler, runner, tokenizer, overlap=config.async_scheduling,
                  max_waiting_requests=config.max_waiting_requests, queue_timeout_s=config.queue_timeout_s,
                  batch_delay=_batch_delay(config),
                  memory_profiler=MemoryProfiler() if config.enable_memory_profiler else None)


def _host_memory(steps: Blueprint) -> HostMemory | None:
    """What the options leave on the host for KV blocks.

    Raises:
      InvalidInputError: not one block.
    """
    config, ranks = steps.config, steps.mesh.shape[TENSOR]
    if not config.swap_space:
        return None
    per_block = block_bytes(steps.cache) // ranks
    if not (num_blocks := num_host_blocks(config, per_block)):
        raise InvalidInputError("swap_space", config.swap_space,
                                f"0, or at least one block, {per_block / 2**30:.2g} GiB")
    link_bytes_per_s, flops_per_s = RATES["cpu" if steps.mesh.devices.flat[0].platform == "cpu" else "gpu"]
    costs = MoveCosts(block_bytes=per_block, token_flops=token_flops(steps.model) / ranks,
                      link_bytes_per_s=link_bytes_per_s, flops_per_s=flops_per_s)
    return HostMemory(num_blocks=num_blocks, costs=costs, preemption_mode=config.preemption_mode)


def _drafter(config: EngineConfig) -> NgramDrafter | None:
    return None if config.speculative_config is None else NgramDrafter(config.speculative_config)


def _prefill_limits(config: EngineConfig) -> PrefillLimits:
    return PrefillLimits(long_prefill_token_threshold=config.long_prefill_token_threshold,
                         max_num_partial_prefills=config.max_num_partial_prefills,
                         max_long_partial_prefills=config.max_long_partial_prefills)


def _batch_delay(config: EngineConfig) -> BatchDelay | None:
    assert config.max_num_seqs
    if not config.max_queue_delay_ms:
        return None
    return BatchDelay(config.max_queue_delay_ms / 1e3, config.preferred_batch_size or config.max_num_seqs)


def _with_cache(steps: Blueprint) -> Blueprint:
    """With as many KV blocks as the options ask for, or as the memory holds."""
    return with_blocks(steps, num_kv_blocks(
        steps.config, steps.cache, steps.mesh.devices.flat[0], tensor_parallel_size=steps.mesh.shape[TENSOR],
        weight_bytes=shard_bytes(steps.leaves), working_bytes=lambda: working_bytes(steps) + _staging_bytes(steps)))


def _staging_bytes(steps: Blueprint) -> int:
    """Per device, of KV blocks on their way to or from the host."""
    return STAGING_BLOCKS * block_bytes(steps.cache) // steps.mesh.shape[TENSOR] if steps.config.swap_space else 0


def _sample_tokens(tokenizer: Tokenizer | None, steps: Blueprint) -> list[int]:
    """Of a text with something of everything; without a tokenizer ids from all over the vocabulary."""
    from jaxserve.runner.kv_scales import SAMPLE_TEXT

    vocab_size, most = steps.model.vocab_size, steps.config.max_model_len
    assert most is not None
    if tokenizer is None:
        return list(range(0, vocab_size, -(-vocab_size // min(256, most))))
    return tokenizer.encode(SAMPLE_TEXT)[:most]


def _steps(config: EngineConfig, model: ModelConfig,
           mesh: jax.sharding.Mesh) -> tuple[Blueprint, Executables | None]:
    """The engine's steps with resolved options, and the executables that were asked for if they are for just these."""
    platform = mesh.devices.flat[0].platform
    if config.executables is not None:
        executables = Executables(config.executables)
        try:
            as_there = executables.take_over(config).resolve(model, platform)
            steps = _with_cache(blueprint(model, as_there, mesh, params=executables.params(model)))
            why_not = executables.why_not(steps)
        except InvalidInputError as error:
            why_not = f"with its options {error}"
        if why_not is None:
            return steps, executables
        logger.warning("executables in %s are not used, steps are compiled as usual: %s", executables.folder, why_not)
    return blueprint(model, config.resolve(model, platform), mesh), None


def _loading(steps: Blueprint, executables: Executables) -> Programs:
    """Programs from files; the one for a first prompt is read while the weights are."""
    programs = Programs(steps, executables)
    by_name = steps.buckets.by_name()
    there = by_name.keys() & executables.manifest.programs
    name = ahead.begun(executables.folder) or ahead.program_for_first_prompt(there)
    if name in there:  # a manifest may name what nobody asks for
        programs.prefetch([by_name[name]])
    return programs


def _load(source: Source, steps: Blueprint) -> dict[str, jax.Array]:
    shardings = {path: leaf.sharding for path, leaf in zip(steps.params, steps.leaves, strict=True)}
    return load_params(source, steps.model, steps.params, tensor_parallel_size=steps.mesh.shape[TENSOR],
                       shardings=shardings)


def _tokenizer(source: Source, folder: str | None) -> Tokenizer:
    if folder is not None:
        return Tokenizer.from_folder(folder)
    data = source.tokenizer()
    tokenizer = Tokenizer(data.backend, data.config)
    if not tokenizer.encode("a", add_special_tokens=False):  # transformers makes an empty one up
        raise CheckpointError(f"{source.name} has no tokenizer; give tokenizer=FOLDER or skip_tokenizer_init=True")
    return tokenizer


def _eos_token_ids(source: Source, tokenizer: Tokenizer | None) -> set[int]:
    """All ids that end a text by generation config, model config or tokenizer."""
    found: set[int] = set()
    for given in (source.generation_config.get("eos_token_id"), source.hf_config.get("eos_token_id")):
        found.update([given] if isinstance(given, int) else given or [])
        if found:
            break
    if tokenizer is not None and (eos := tokenizer.eos_token_id) is not None:
        found.add(eos)
    return found


def _default_sampling(generation_config: Mapping[str, Any]) -> SamplingParams:
    """vLLM's defaults with what the checkpoint suggests."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if generation_config.get("max_new_tokens") is not None:
        given["max_tokens"] = generation_config["max_new_tokens"]
    return SamplingParams(**given)
