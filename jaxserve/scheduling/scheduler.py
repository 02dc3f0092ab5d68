"""Continuous batching: before every step, choose which tokens of which requests are computed."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.host_tier import HostMemory, HostTier
from jaxserve.scheduling.limits import PrefillLimits
from jaxserve.scheduling.ngram import NgramDrafter
from jaxserve.scheduling.plan import Chunk, StepPlan
from jaxserve.scheduling.policy import Policy, PolicyName, PriorityWeights, WaitingQueue
from jaxserve.scheduling.prefix_cache import PrefixCache


class Scheduler:
    """First come, first served (or by rank, see `policy`), decodes before prefills, prompts cut into chunks that fit
    the token budget.

    When blocks run out the last running request in that order is preempted: its blocks are freed and it waits, in its
    old place, to compute its tokens again, or with `host_memory` to get copies of its blocks back and go on. The first
    request therefore always advances. With priorities the last ones also make room for one that waits and comes before
    them.

    Steps are planned ahead: a step is planned while the one before still runs, so a request's newest token may be
    known only to the device (`Request.num_inflight`). A request that will have reached its length by then is left
    out; one that turns out to have ended by a stop has computed one token too many, which is dropped. Its blocks can
    be reused at once all the same: the device runs steps in order, so whatever the dropped token wrote is overwritten
    before it can be read.

    No block that several requests hold is written to: a request only shares blocks whose tokens all its holders count
    as computed (see `BlockPool`; `check_integrity` looks).

    With a `drafter` the next tokens of requests that allow it are guessed, in rows of the step that nobody else needs.
    How many of them hold is known when the step is read: `settle`.

    Attributes:
      host: what lies in host memory, if there is any for it.
      running: in order of their places, the first one first.
      block_tables: int32 [max_num_seqs, M], row = Request.slot: the blocks of each running request, in order.
    """

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int,
                 max_blocks_per_seq: int, enable_prefix_caching: bool = False, policy: PolicyName = "fcfs",
                 priority_weights: PriorityWeights | None = None, prefill_limits: PrefillLimits | None = None,
                 host_memory: HostMemory | None = None, drafter: NgramDrafter | None = None):
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(self.pool, block_size, enabled=enable_prefix_caching)
        self.host = None if host_memory is None else HostTier(host_memory, self.pool)
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.policy = Policy(policy, priority_weights or PriorityWeights(), max_num_batched_tokens)
        self._limits = prefill_limits or PrefillLimits()
        self.drafter = drafter
        self.waiting = WaitingQueue(self.policy.rank)
        self.running: list[Request] = []
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.num_preemptions = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the cache when one request has it all."""
        return (self.pool.num_blocks - 1) * self.block_size

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def num_free_slots(self) -> int:
        """Requests that may run besides those that do."""
        return len(self._free_slots)

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked that it can fit: max_total_tokens - 1 <= capacity_tokens."""
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees what it holds."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.host_block_ids:
            self._drop_host_copy(request)
        self.waiting.forget(request)
        request.status = RequestStatus.FINISHED
        if self.drafter is not None:
            self.drafter.forget(request)

    def schedule(self) -> StepPlan:
        """Plans the next step and counts its tokens as computed; the plan must then be run."""
        plan = StepPlan()
        if self.policy.preempts:
            self._make_room(plan)
        num_made_room = len(plan.preempted)
        self._schedule_decodes(plan)
        budget = self.max_num_batched_tokens - len(plan.decodes)
        budget = self._continue_prefills(plan, budget)
        if len(plan.preempted) == num_made_room:  # else blocks are short
            budget = self._admit(plan, budget)
        if self.drafter is not None and not self.waiting:
            self._add_drafts(plan, budget, self.drafter)
        if self.host is not None:
            plan.swap_out, plan.swap_in = self.host.take_moves()
        return plan

    def settle(self, request: Request, num_rejected: int) -> None:
        """A step with guesses has been read, and so many of them did not hold."""
        request.draft_token_ids = []
        request.num_inflight -= num_rejected
        if request.status is not RequestStatus.RUNNING:
            return  # ended, or waits to compute its tokens again
        request.num_computed_tokens -= num_rejected
        kept = self._blocks_for(request.num_computed_tokens)
        self.pool.free(request.block_ids[kept:])
        del request.block_ids[kept:]
        self.prefixes.publish(request)

    def revise(self, plan: StepPlan) -> None:
        """Leaves out of a plan, which has not run yet, what has ended since it was made.

        If a chunk is left out, so are all: others may count on what it would have written. They compute it again. The
        plan's copies between device and host have been made.
        """
        plan.drop_finished_decodes()
        if not any(chunk.request.is_finished for chunk in plan.chunks):
            return
        self.pool.forget(plan.published)
        for chunk in reversed(plan.chunks):
            if not chunk.request.is_finished:
                chunk.request.num_inflight -= chunk.samples
                if chunk.enters:
                    self.prefixes.uncount(chunk.request)
                self._requeue(chunk.request)
        plan.chunks, plan.published = [], []

    def recompute_all(self) -> None:
        """Preempts everything that runs, because what the cache holds is no longer valid."""
        for request in reversed(tuple(self.running)):
            self._preempt(request, swap=False)
        self.prefixes.new_weights()
        for request in self.waiting:
            request.block_names.clear()
            if request.host_block_ids:
                self._drop_host_copy(request)
        if self.host is not None:
            self.host.pool.forget_all()

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, slots and tables agree with the requests. For tests and idle loops."""
        self.pool.check_integrity(request.block_ids for request in self.requests())
        slots = [request.slot for request in self.running if request.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(len(self.block_tables))), "slots are lost or doubled"
        for request in self.running:
            assert self.block_tables[request.slot, : len(request.block_ids)].tolist() == request.block_ids
            most = self._blocks_for(request.num_tokens + max(request.num_inflight, 1))
            assert len(request.block_ids) <= most, f"{request.request_id} holds more than {most} blocks"
            for index, block_id in enumerate(request.block_ids):
                assert self.pool.refs(block_id) == 1 or self._is_safe_to_share(request, index), (
                    f"{request.request_id} may write to block {block_id}, which it shares")
        for request in self.waiting:
            assert not request.block_ids and request.slot is None
            assert len(request.host_block_ids) == self._blocks_for(request.num_computed_tokens)
        if self.host is not None:
            self.host.pool.check_integrity(request.host_block_ids for request in self.waiting)

    def _is_safe_to_share(self, request: Request, index: int) -> bool:
        """Whether its index-th block is known by its content, and full of tokens that are computed."""
        is_named = self.pool.name_of(request.block_ids[index]) is not None
        return is_named and (index + 1) * self.block_size <= request.num_computed_tokens

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Every running request whose one uncomputed token is its newest."""
        decodes, positions, from_device = plan.decodes, plan.positions, plan.from_device
        block_size = self.block_size
        for request in tuple(self.running):
            position = request.num_computed_tokens
            num_known = request.num_tokens + request.num_inflight
            if position + 1 != num_known or request.status is not RequestStatus.RUNNING:
                continue  # still in prefill, or preempted a moment ago
            if request.num_inflight and (num_known >= request.max_total_tokens or request.needs_host_tokens):
                continue  # ends with the token in flight, or must see it first
            if position == len(request.block_ids) * block_size:
                self.prefixes.publish(request)  # its last block, full since the step before
                if not self._grow(request, position + 1, plan):
                    continue
            decodes.append(request)
            positions.append(position)
            from_device.append(request.num_inflight > 0)
            request.num_computed_tokens = position + 1
            request.num_inflight += 1

    def _add_drafts(self, plan: StepPlan, budget: int, drafter: NgramDrafter) -> None:
        """Guesses what follows the tokens that the plan computes, as far as rows and blocks are there for nothing."""
        num_rows = min(budget, len(self._free_slots))
        for request in tuple(plan.decodes):
            most = min(num_rows - plan.num_drafts, request.max_total_tokens - request.num_tokens - 1)
            if request.speculates and (drafts := drafter.propose(request, most)):
                self._check_drafts(plan, request, drafts)

    def _check_drafts(self, plan: StepPlan, request: Request, drafts: list[int]) -> None:
        """Adds guesses to the plan if blocks are free for them."""
        start, held = request.num_computed_tokens, len(request.block_ids)
        block_ids = self.pool.allocate(self._blocks_for(start + len(drafts)) - held)
        if block_ids is None:
            return
        request.block_ids += block_ids
        self.block_tables[request.slot, held : held + len(block_ids)] = block_ids
        plan.decodes += [request] * len(drafts)
        plan.positions += range(start, start + len(drafts))
        plan.from_device += [False] * len(drafts)
        plan.num_drafts += len(drafts)
        request.draft_token_ids = drafts
        request.num_computed_tokens += len(drafts)
        request.num_inflight += len(drafts)

    def _continue_prefills(self, plan: StepPlan, budget: int) -> int:
        """Next chunks of prompts begun in earlier steps; returns what is left of the budget."""
        for request in tuple(self.running):
            remaining = request.num_tokens - request.num_computed_tokens
            if budget == 0:
                break
            if remaining <= 0 or request.status is not RequestStatus.RUNNING:
                continue  # decodes, which have computed all they know
            if self.policy.preempts:
                budget = self._admit(plan, budget, ahead_of=request)
            num_tokens = self._limits.chunk(remaining, budget)
            if num_tokens and self._grow(request, request.num_computed_tokens + num_tokens, plan):
                self._add_chunk(plan, request, num_tokens)
                budget -= num_tokens
        return budget

    def _admit(self, plan: StepPlan, budget: int, ahead_of: Request | None = None) -> int:
        """Starts waiting requests, in order, while a slot, budget and blocks for the whole prompt are there; only those
        that come before `ahead_of`, if it is given. Returns what is left of the budget."""
        limits, skipped = self._limits, []
        while budget > 0 and self._free_slots:
            request = self.waiting.first()
            if request is None or request.num_inflight:
                break
            if ahead_of is not None and self.waiting.place(request) > self.waiting.place(ahead_of):
                break
            cached = self.prefixes.match(request)
            if self._missing_blocks(request, cached) > 0:
                break
            if limits.counts:
                remaining = request.num_tokens - max(len(cached) * self.block_size, request.num_computed_tokens)
                is_long, is_partial = limits.is_long(remaining), limits.chunk(remaining, budget) < remaining
                if is_partial and self._has_partial(limits.max_num_partial_prefills):
                    break
                if is_long and self._has_partial(limits.max_long_partial_prefills, only_long=True):
                    skipped.append(self.waiting.pop())
                    continue
            self.waiting.pop()
            self._start(request, cached)
            num_tokens = limits.chunk(request.num_tokens - request.num_computed_tokens, budget)
            self._grow(request, request.num_computed_tokens + num_tokens, plan)
            self._add_chunk(plan, request, num_tokens, enters=True)
            budget -= num_tokens
        for request in skipped:
            self.waiting.add(request)
        return budget

    def _has_partial(self, count: int | None, *, only_long: bool = False) -> bool:
        """Whether so many prompts, or long prompts, are begun and not finished; no number is ever reached by None."""
        if count is None:
            return False
        return count <= sum(request.num_computed_tokens < request.num_tokens
                            and (not only_long or self._limits.is_long(request.num_tokens)) for request in self.running)

    def _missing_blocks(self, request: Request, cached: list[int]) -> int:
        """How many blocks more must be free before it can start; it would share those in `cached`."""
        free = self.pool.num_free - self.pool.num_idle(cached)
        return self._blocks_for(request.num_tokens) - len(cached) - free

    def _make_room(self, plan: StepPlan) -> None:
        """Preempts running requests that come after the first one that waits, as many as it needs."""
        request = self.waiting.first()
        while request is not None and not request.num_inflight and self.running and (
                not self._free_slots or self._missing_blocks(request, self.prefixes.match(request)) > 0):
            last = self.running[-1]
            if self.waiting.place(last) < self.waiting.place(request):
                return
            self._preempt(last)
            plan.preempted.append(last)

    def _start(self, request: Request, cached: list[int]) -> None:
        """Makes a waiting request a running one that holds these blocks, whose tokens need no computing, and those
        that come back from the host."""
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        bisect.insort(self.running, request, key=self.waiting.place)
        self.pool.share(cached)
        num_swapped_tokens = request.num_computed_tokens
        request.block_ids = cached
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_published_blocks = len(cached)
        if self.host is not None:
            self._fetch(request, num_swapped_tokens, self.host)
        self.block_tables[request.slot, : len(request.block_ids)] = request.block_ids
        self.prefixes.count(request, request.num_computed_tokens)

    def _fetch(self, request: Request, num_swapped_tokens: int, host: HostTier) -> None:
        """Goes on with what the host holds beyond the request's blocks: its own if it was swapped out, else cached
        ones. There are blocks for it, since there are for all its tokens."""
        num_held = len(request.block_ids)
        if num_swapped_tokens > request.num_computed_tokens:
            host_ids = request.host_block_ids[num_held:]
            request.num_computed_tokens = num_swapped_tokens
        else:
            host_ids = host.cached(self.prefixes.wanted(request)[num_held:], self.block_size)
            request.num_computed_tokens += len(host_ids) * self.block_size
        host.hold(host_ids)
        host.drop(request)
        block_ids = self.pool.allocate(len(host_ids))
        assert block_ids is not None
        host.copy_back(block_ids, host_ids)
        request.block_ids += block_ids
        self.prefixes.publish(request)

    def _drop_host_copy(self, request: Request) -> None:
        assert self.host is not None
        self.host.drop(request)
        request.num_computed_tokens = 0

    def _add_chunk(self, plan: StepPlan, request: Request, num_tokens: int, *, enters: bool = False) -> None:
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        request.num_inflight += samples
        plan.chunks.append(Chunk(request, start, num_tokens, samples, enters))
        plan.published += self.prefixes.publish(request)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Gives the request blocks for its first `num_tokens` tokens, preempting newer requests if it must."""
        held = len(request.block_ids)
        needed = self._blocks_for(num_tokens) - held
        while (block_ids := self.pool.allocate(needed)) is None:
            victim = self._victim(plan)
            if victim is None:
                return False
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is request:
                return False
        request.block_ids += block_ids
        self.block_tables[request.slot, held : held + needed] = block_ids
        return True

    def _victim(self, plan: StepPlan) -> Request | None:
        """The last running request, unless it is part of this very step already."""
        victim = self.running[-1]
        planned = victim in plan.decodes or any(chunk.request is victim for chunk in plan.chunks)
        return None if planned else victim

    def _preempt(self, victim: Request, *, swap: bool = True) -> None:
        victim.num_preemptions += 1
        self.num_preemptions += 1
        num_kept_tokens = 0
        if swap and self.host is not None and not victim.draft_token_ids:  # what of them holds is not known yet
            self.prefixes.publish(victim)  # the host keeps a block that others hold too only once
            if self.host.swap_out(victim):
                num_kept_tokens = victim.num_computed_tokens
        self._requeue(victim, num_kept_tokens)

    def _requeue(self, request: Request, num_kept_tokens: int = 0) -> None:
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = num_kept_tokens
        self.waiting.add(request)

    def _release(self, request: Request) -> None:
        self.pool.free(reversed(request.block_ids))  # of what is cached the end is evicted first
        request.block_ids = []
        request.num_published_blocks = 0
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
