"""Owns what is on the device; turns plans into dispatched steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.models.params import abstract_model, split
from jaxserve.request import Request, SamplingParams
from jaxserve.runner.assembler import BatchAssembler
from jaxserve.runner.buckets import Bucket, Buckets
from jaxserve.runner.kv_cache import CacheSpec
from jaxserve.runner.programs import Programs
from jaxserve.runner.sharding import TENSOR
from jaxserve.runner.step import DeviceState, StepOutputs, abstract_state, compile_step, zeros_like
from jaxserve.sampling import rows
from jaxserve.sampling.state import set_bias, set_row
from jaxserve.scheduling.plan import StepPlan
from pallas_kernels.paged_attention.api import QUERY_TILE


@dataclass(slots=True)
class Dispatched:
    """A step on its way: its plan and the arrays that will hold its results."""

    plan: StepPlan
    outputs: StepOutputs


class ModelRunner:
    """Weights, KV cache and compiled steps of one model on one mesh.

    Args:
      config: resolved options.
      params: dotted path -> array, sharded over the mesh.
      cache_spec: the KV cache to make.
      block_tables: the scheduler's, int32 [max_num_seqs, M].
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, params: Mapping[str, jax.Array], mesh: Mesh,
                 cache_spec: CacheSpec, block_tables: np.ndarray):
        assert config.max_num_seqs and config.max_num_batched_tokens, "config is not resolved"
        self._model, self.mesh = model, mesh
        self._graphdef, _, self._paths = split(
            abstract_model(model, tensor_parallel_size=mesh.shape[TENSOR], dtype=jnp.dtype(config.dtype)))
        self._leaves = tuple(params[path] for path in self._paths)
        self.buckets = Buckets(max_num_seqs=config.max_num_seqs, query_tile=QUERY_TILE,
                               max_num_batched_tokens=config.max_num_batched_tokens,
                               platform=mesh.devices.flat[0].platform)
        self._assembler = BatchAssembler(block_tables, query_tile=QUERY_TILE)
        self._slot_owners: list[Request | None] = [None] * config.max_num_seqs
        self._banned: dict[Request, set[int]] = {}
        self._abstract_args = (
            tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in self._leaves),
            abstract_state(cache_spec, config.max_num_seqs, model.vocab_size, mesh))
        self._state = zeros_like(self._abstract_args[1])
        self.programs = Programs(self._compile)

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """Sends a step to the device and returns at once; results come through the returned arrays."""
        self._update_slots(plan)
        bucket = self.buckets.pick(plan)
        ints, floats = self._assembler.assemble(plan, bucket)
        self._state, outputs = self.programs.get(bucket)(self._leaves, self._state, ints, floats)
        outputs.token_ids.copy_to_host_async()
        if plan.chunks:  # decodes follow: compile their step while this one runs
            self.programs.prefetch([self.buckets.for_decode(len(plan.rows()))])
        return Dispatched(plan, outputs)

    def is_compiled(self, plan: StepPlan) -> bool:
        """Whether `dispatch` would start the step without waiting for the compiler; if not, that begins its work."""
        bucket = self.buckets.pick(plan)
        self.programs.prefetch([bucket])
        return self.programs.is_ready(bucket)

    def warm_up(self) -> float:
        """Compiles everything that any plan can need; returns the seconds it took."""
        start = time.monotonic()
        self.programs.prefetch(self.buckets.all())
        trash, vocab_size = len(self._slot_owners), self._model.vocab_size
        made = rows.build_rows(SamplingParams(), vocab_size, [], [])
        self._set_sampling(set_row, trash, *made)
        self._set_sampling(set_bias, trash, made[-1])
        self.programs.wait()
        return time.monotonic() - start

    def set_params(self, params: Mapping[str, jax.Array]) -> None:
        """Uses other weights from the next step on. Same paths, shapes, dtypes and shardings as the old ones."""
        self._leaves = tuple(params[path] for path in self._paths)

    def params(self) -> dict[str, jax.Array]:
        """The weights in use by dotted path."""
        return dict(zip(self._paths, self._leaves, strict=True))

    def close(self) -> None:
        """Frees compiler threads, weights (unless others hold them) and the KV cache."""
        self.programs.close()
        self._leaves = ()
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()

    def _compile(self, bucket: Bucket) -> Compiled:
        return compile_step(self._graphdef, self._assembler.layout(bucket), self.mesh, *self._abstract_args)

    def _update_slots(self, plan: StepPlan) -> None:
        """Brings the per-slot arrays up to date for requests that are new in their slot or whose bans change."""
        for chunk in plan.chunks:
            request = chunk.request
            assert request.slot is not None
            if self._slot_owners[request.slot] is not request or chunk.start == 0:
                self._enter_slot(request)
        if self._banned:
            self._update_bans(plan)

    def _enter_slot(self, request: Request) -> None:
        assert request.slot is not None
        previous = self._slot_owners[request.slot]
        if previous is not None and previous.slot is None:  # else it was preempted and sits in another slot by now
            self._banned.pop(previous, None)
        self._slot_owners[request.slot] = request
        uses_row = rows.needs_row(request.params)
        self._assembler.set_slot(request, uses_row=uses_row)
        if uses_row:
            banned = self._bans(request)
            made = rows.build_rows(request.params, self._model.vocab_size, request.prompt_token_ids,
                                   request.output_token_ids, banned)
            self._set_sampling(set_row, request.slot, *made)
            if request.params.min_tokens or request.bad_words_ids:
                self._banned[request] = banned

    def _update_bans(self, plan: StepPlan) -> None:
        for request in plan.rows():
            if request in self._banned and (banned := self._bans(request)) != self._banned[request]:
                self._banned[request] = banned
                assert request.slot is not None
                bias = rows.build_bias(request.params, self._model.vocab_size, banned)
                self._set_sampling(set_bias, request.slot, bias)

    def _bans(self, request: Request) -> set[int]:
        # The plan already counts this step's token as in flight.
        before = len(request.output_token_ids) + max(request.num_inflight - 1, 0)
        return rows.banned_ids(request.params, request.output_token_ids, before, request.stop_ids,
                               request.bad_words_ids)

    def _set_sampling(self, update: Any, slot: int, *arrays: np.ndarray) -> None:
        sampling = update(self._state.sampling, np.int32(slot), *arrays)
        self._state = DeviceState(self._state.caches, self._state.last_tokens, sampling)



def step_temp_bytes(config: EngineConfig, model: ModelConfig, params: Mapping[str, jax.Array], mesh: Mesh,
                    cache_spec: CacheSpec) -> int:
    """Bytes per device that the largest step takes besides weights and cache, by the compiler's own account."""
    runner = ModelRunner(config, model, params, mesh, replace(cache_spec, num_blocks=2),
                         np.zeros((config.max_num_seqs or 1, blocks_per_seq(config)), np.int32))
    try:
        analysis: Any = runner.programs.get(runner.buckets.mixed[-1]).memory_analysis()
    finally:
        runner.close()
    # The runner's own per-request arrays are counted too: they will be there.
    return analysis.temp_size_in_bytes + analysis.output_size_in_bytes


def blocks_per_seq(config: EngineConfig) -> int:
    """Columns of the block tables: a sequence of max_model_len tokens, and the one that is sampled last."""
    assert config.max_model_len is not None, "config is not resolved"
    return -(-(config.max_model_len + 1) // config.block_size)
