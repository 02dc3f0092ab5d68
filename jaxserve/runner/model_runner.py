"""Owns what is on the device; turns plans into dispatched steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.stages import Compiled

from jaxserve import compat
from jaxserve.errors import ExecutablesError
from jaxserve.executables.load import Executables
from jaxserve.request import Request, SamplingParams
from jaxserve.runner.assembler import BatchAssembler
from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.kv_cache import scaled
from jaxserve.runner.kv_scales import scale_finder
from jaxserve.runner.programs import Programs
from jaxserve.runner.step import StepOutputs, zeros_like
from jaxserve.sampling import rows
from jaxserve.sampling.state import set_bias, set_row
from jaxserve.scheduling.plan import StepPlan
from pallas_kernels.paged_attention.api import QUERY_TILE

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatched:
    """A step on its way: its plan and the arrays that will hold its results."""

    plan: StepPlan
    outputs: StepOutputs


class ModelRunner:
    """Weights, KV cache and compiled steps of one model on one mesh.

    Args:
      blueprint: of the steps.
      params: dotted path -> array, sharded over the mesh.
      block_tables: the scheduler's, int32 [max_num_seqs, M].
      sample_tokens: of a text that shows how large keys and values get, for an int8 cache.
      executables: where steps come from instead of the compiler; known to be for this blueprint.
    """

    def __init__(self, blueprint: Blueprint, params: Mapping[str, jax.Array], block_tables: np.ndarray,
                 executables: Executables | None = None, sample_tokens: Sequence[int] = ()):
        self._executables = executables
        self._scales_of, self._sample_tokens = scale_finder(blueprint), sample_tokens
        self.blueprint = blueprint
        self.mesh, self.buckets = blueprint.mesh, blueprint.buckets
        self._leaves = tuple(params[path] for path in blueprint.params)
        self._assembler = BatchAssembler(block_tables, query_tile=QUERY_TILE)
        self._slot_owners: list[Request | None] = [None] * len(block_tables)
        self._banned: dict[Request, set[int]] = {}
        self._state = zeros_like(blueprint.state)
        self.programs = Programs(self._make_program)
        self.find_kv_scales()

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
        trash, vocab_size = len(self._slot_owners), self.blueprint.model.vocab_size
        made = rows.build_rows(SamplingParams(), vocab_size, [], [])
        self._set_sampling(set_row, trash, *made)
        self._set_sampling(set_bias, trash, made[-1])
        self.programs.wait()
        return time.monotonic() - start

    def set_params(self, params: Mapping[str, jax.Array]) -> None:
        """Uses other weights from the next step on. Same paths, shapes, dtypes and shardings as the old ones."""
        self._leaves = tuple(params[path] for path in self.blueprint.params)

    def find_kv_scales(self) -> None:
        """Finds the scales of an int8 cache on the sample text. Only while the cache holds nothing of use."""
        if not self.blueprint.cache.has_scales:
            return
        scales = self._scales_of(self._leaves, self._sample_tokens)
        self._state = replace(self._state, caches=scaled(self._state.caches, scales))

    def params(self) -> dict[str, jax.Array]:
        """The weights in use by dotted path."""
        return dict(zip(self.blueprint.params, self._leaves, strict=True))

    def close(self) -> None:
        """Frees compiler threads, weights (unless others hold them) and the KV cache."""
        self.programs.close()
        self._leaves = ()
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()

    def _make_program(self, bucket: Bucket) -> Compiled:
        start = time.monotonic()
        if self._executables is not None:
            try:
                program = self._executables.load(bucket, self.blueprint)
            except ExecutablesError as error:
                logger.warning("%s; compiling %s as usual", error, bucket)
            else:
                logger.info("took %s from its file in %.1f s", bucket, time.monotonic() - start)
                return program
        program = self.blueprint.lower(bucket).compile()
        compat.return_freed_memory()
        logger.info("compiled %s in %.1f s", bucket, time.monotonic() - start)
        return program

    def _update_slots(self, plan: StepPlan) -> None:
        """Brings the per-slot arrays up to date for requests that are new in their slot or whose bans change."""
        for chunk in plan.chunks:
            request = chunk.request
            assert request.slot is not None
            if chunk.enters:
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
            made = rows.build_rows(request.params, self.blueprint.model.vocab_size, request.prompt_token_ids,
                                   request.output_token_ids, banned)
            self._set_sampling(set_row, request.slot, *made)
            if request.params.min_tokens or request.bad_words_ids:
                self._banned[request] = banned

    def _update_bans(self, plan: StepPlan) -> None:
        for request in plan.rows():
            if request in self._banned and (banned := self._bans(request)) != self._banned[request]:
                self._banned[request] = banned
                assert request.slot is not None
                bias = rows.build_bias(request.params, self.blueprint.model.vocab_size, banned)
                self._set_sampling(set_bias, request.slot, bias)

    def _bans(self, request: Request) -> set[int]:
        # The plan already counts this step's token as in flight.
        before = len(request.output_token_ids) + max(request.num_inflight - 1, 0)
        return rows.banned_ids(request.params, request.output_token_ids, before, request.stop_ids,
                               request.bad_words_ids)

    def _set_sampling(self, update: Any, slot: int, *arrays: np.ndarray) -> None:
        sampling = update(self._state.sampling, np.int32(slot), *arrays)
        self._state = replace(self._state, sampling=sampling)
