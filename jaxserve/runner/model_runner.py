"""Owns what is on the device; turns plans into dispatched steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.request import Request, SamplingParams
from jaxserve.runner.assembler import BatchAssembler
from jaxserve.runner.block_mover import BlockMover
from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.kv_cache import scaled
from jaxserve.runner.programs import Programs
from jaxserve.runner.state import StepOutputs, zeros_like
from jaxserve.sampling import rows
from jaxserve.sampling.state import mask_words, set_allowed, set_bias, set_row
from jaxserve.scheduling.plan import StepPlan
from pallas_kernels.paged_attention.api import QUERY_TILE

if TYPE_CHECKING:
    from jaxserve.runner.kv_scales import Scales


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
      programs: of the blueprint, if some are being made already.
      mover: of KV blocks to host memory and back, if the scheduler plans that.
    """

    def __init__(self, blueprint: Blueprint, params: Mapping[str, jax.Array], block_tables: np.ndarray,
                 programs: Programs | None = None, sample_tokens: Sequence[int] = (),
                 mover: BlockMover | None = None):
        self._sample_tokens = sample_tokens
        self.blueprint = blueprint
        self.mesh, self.buckets = blueprint.mesh, blueprint.buckets
        self._leaves = tuple(params[path] for path in blueprint.params)
        self._assembler = BatchAssembler(block_tables, query_tile=QUERY_TILE)
        self._slot_owners: list[Request | None] = [None] * len(block_tables)
        self._banned: dict[Request, set[int]] = {}
        self._guided: set[Request] = set()
        self._state = zeros_like(blueprint.state)
        self.mover = mover
        self.programs = programs or Programs(blueprint)
        self._ran_lone = False
        self.find_kv_scales()

    def move(self, plan: StepPlan) -> None:
        """Sends the plan's copies between device and host on their way: after all steps so far, before the next."""
        assert self.mover is not None
        self._state = replace(self._state, caches=self.mover.run(self._state.caches, plan))

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """Sends a step to the device and returns at once; results come through the returned arrays."""
        self._update_slots(plan)
        bucket = self._bucket_for(plan)
        if bucket.is_lone:
            if self._ran_lone:  # not at once: the program for the next token is waited for, this one is not
                self.programs.prefetch([self.buckets.pick(plan)])
            self._ran_lone = True
        ints, floats = self._assembler.assemble(plan, bucket)
        self._state, outputs = self.programs.get(bucket)(self._leaves, self._state, ints, floats)
        outputs.token_ids.copy_to_host_async()
        return Dispatched(plan, outputs)

    def is_compiled(self, plan: StepPlan) -> bool:
        """Whether `dispatch` would start the step without waiting for the compiler."""
        return self.programs.is_ready(self._bucket_for(plan))

    def _bucket_for(self, plan: StepPlan) -> Bucket:
        """The plan's, or one that stands in for it as long as it is not ready."""
        bucket = self.buckets.pick(plan)
        if self.programs.is_ready(bucket):
            return bucket
        return next(filter(self.programs.is_begun, self.buckets.lone_for(plan)), bucket)

    def warm_up(self) -> float:
        """Compiles everything that any plan can need; returns the seconds it took."""
        start = time.monotonic()
        self.programs.prefetch(self.buckets.all())
        trash, vocab_size = len(self._slot_owners), self.blueprint.model.vocab_size
        made = rows.build_rows(SamplingParams(), vocab_size, [], [])
        self._set_sampling(set_row, trash, *made)
        self._set_sampling(set_bias, trash, made[-1])
        for size in self._mask_sizes():
            self._set_allowed(*self._mask_buffers(size))
        if self.mover is not None:
            self._state = replace(self._state, caches=self.mover.warm_up(self._state.caches))
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

    @cached_property
    def _scales_of(self) -> Callable[[Sequence[jax.Array], Sequence[int]], Scales]:
        from jaxserve.runner.kv_scales import scale_finder  # with all layers, which may not be needed

        return scale_finder(self.blueprint)

    def params(self) -> dict[str, jax.Array]:
        """The weights in use by dotted path."""
        return dict(zip(self.blueprint.params, self._leaves, strict=True))

    def close(self) -> None:
        """Frees compiler threads, weights (unless others hold them) and the KV cache."""
        self.programs.close()
        if self.mover is not None:
            self.mover.close()
        self._leaves = ()
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()

    def _update_slots(self, plan: StepPlan) -> None:
        """Brings the per-slot arrays up to date for requests that are new in their slot or whose bans change."""
        for chunk in plan.chunks:
            request = chunk.request
            assert request.slot is not None
            if chunk.enters:
                self._enter_slot(request)
        if self._banned:
            self._update_bans(plan)
        if self._guided:
            self._update_guided(plan)

    def _enter_slot(self, request: Request) -> None:
        assert request.slot is not None
        previous = self._slot_owners[request.slot]
        if previous is not None and previous.slot is None:  # else it was preempted and sits in another slot by now
            self._banned.pop(previous, None)
            self._guided.discard(previous)
        self._slot_owners[request.slot] = request
        if request.guide is not None:
            self._guided.add(request)
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

    def _update_guided(self, plan: StepPlan) -> None:
        """Sends the masks of guided requests that sample in this step, all at once. Those are of one step at a time:
        the device may be busy with that of others meanwhile."""
        sampling = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        guided = [request for request in sampling if request in self._guided]
        if not guided:
            return
        slots, words = self._mask_buffers(len(guided))
        for row, request in enumerate(guided):
            slots[row] = request.slot
            request.guide.fill(words[row])
        self._set_allowed(slots, words)

    def _mask_buffers(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Slots [N] and masks [N, W], N one of few numbers from `count` on: each is a program."""
        num_slots = len(self._slot_owners)
        size = next(size for size in self._mask_sizes() if size >= count)
        words = np.zeros((size, mask_words(self.blueprint.model.vocab_size)), np.uint32)
        return np.full(size, num_slots, np.int32), words

    def _mask_sizes(self) -> list[int]:
        num_slots = len(self._slot_owners)
        return [*(size for size in (1, 8, 64) if size < num_slots), num_slots]

    def _set_allowed(self, slots: np.ndarray, words: np.ndarray) -> None:
        self._state = replace(self._state, sampling=set_allowed(self._state.sampling, slots, words))

    def _bans(self, request: Request) -> set[int]:
        # The plan already counts this step's token as in flight.
        before = len(request.output_token_ids) + max(request.num_inflight - 1, 0)
        return rows.banned_ids(request.params, request.output_token_ids, before, request.stop_ids,
                               request.bad_words_ids)

    def _set_sampling(self, update: Any, slot: int, *arrays: np.ndarray) -> None:
        sampling = update(self._state.sampling, np.int32(slot), *arrays)
        self._state = replace(self._state, sampling=sampling)
