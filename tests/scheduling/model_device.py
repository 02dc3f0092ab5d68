"""A stand-in for the device that keeps what each block holds, to check that every request reads its own past."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler

Keys = list[int]


@dataclass
class ModelDevice:
    """Runs plans in order, reads each one step late with `overlap`. Output token i of every request is 1000 + i.

    Attributes:
      stops: request -> outputs after which it stops, if that is before its length.
      device, host: block -> for each slot a digest of all tokens up to the one whose key and value lie there.
      weights: version; part of the digests.
      kept: swapped request -> tokens that it must not compute again.
      names: of a block -> the digest of its last slot, as first seen.
    """

    scheduler: Scheduler
    overlap: bool = True
    stops: dict[Request, int] = field(default_factory=dict)
    device: dict[int, Keys] = field(default_factory=dict)
    host: dict[int, Keys] = field(default_factory=dict)
    weights: int = 0
    kept: dict[Request, int] = field(default_factory=dict)
    names: dict[bytes, int] = field(default_factory=dict)
    ahead: StepPlan | None = None
    _digests: dict[Request, Keys] = field(default_factory=dict)

    def step(self, plan: StepPlan | None = None) -> StepPlan:
        """Plans a step, unless a plan with its moves made is given, runs it, and reads the one before."""
        if plan is None:
            plan = self.plan()
        self._run(plan)
        ready, self.ahead = (self.ahead, plan) if self.overlap else (plan, None)
        self._read(ready)
        return plan

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.move(plan)
        return plan

    def drain(self) -> None:
        self._read(self.ahead)
        self.ahead = None

    def move(self, plan: StepPlan) -> None:
        for device_block, host_block in plan.swap_out:
            self.host[host_block] = list(self.device[device_block])
        for device_block, host_block in plan.swap_in:
            self.device[device_block] = list(self.host[host_block])

    def new_weights(self) -> None:
        self.drain()
        self.weights += 1
        self._digests.clear()
        self.kept = {}
        self.scheduler.recompute_all()

    def note_swapped(self) -> None:
        """Remembers what requests that wait must get back."""
        waiting = self.scheduler.waiting
        self.kept = {request: request.num_computed_tokens for request in waiting if request.host_block_ids}

    def check(self, unwritten: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """All invariants, between two operations.

        Args:
          unwritten: blocks that a plan which has not run yet will fill.
        """
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert len(scheduler.running) <= len(scheduler.block_tables)
        places = [scheduler.waiting.place(request) for request in scheduler.running]
        assert all(first < second for first, second in pairwise(places)), "running requests are out of order"
        pools = [(scheduler.pool, self.device)] + ([(scheduler.host.pool, self.host)] if scheduler.host else [])
        for pool, content in pools:
            held = {b for request in scheduler.requests() for b in (
                request.block_ids if pool is scheduler.pool else request.host_block_ids)}
            assert pool.num_used == len(held) and pool.num_used + pool.num_free == pool.num_blocks - 1
            for block_id in range(1, pool.num_blocks):
                name = pool.name_of(block_id)
                if name is not None and (pool is not scheduler.pool or block_id not in unwritten):
                    last = content[block_id][-1]
                    assert self.names.setdefault(name, last) == last, "a name stands for two contents"
        assert len(set(self.names.values())) == len(self.names), "one content has two names"

    def _run(self, plan: StepPlan) -> None:
        """As a layer does: first all keys of the step are written, then every query reads its sequence's."""
        scheduler, size = self.scheduler, self.scheduler.block_size
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        rows = plan.rows()
        assert len(rows) == len(set(rows)) <= len(scheduler.block_tables), "a request is twice in a step, or too many"
        spans = [(request, start, 1) for request, start in zip(plan.decodes, plan.positions, strict=True)]
        spans += [(chunk.request, chunk.start, chunk.num_tokens) for chunk in plan.chunks]
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            assert chunk.samples == (chunk.start + chunk.num_tokens == chunk.request.num_tokens)
            if chunk.enters:
                assert chunk.start >= self.kept.get(chunk.request, 0), "a swapped request computes again"
        for request, start, count in spans:
            assert request.status is RequestStatus.RUNNING
            assert start + count <= len(request.block_ids) * size, "writes outside its blocks"
            digests = self._digests_of(request, start + count)
            for position in range(start, start + count):
                self.device.setdefault(request.block_ids[position // size], [0] * size)[position % size] = (
                    digests[position])
        for request, start, count in spans:
            digests, total = self._digests_of(request, start + count), start + count
            for index in range(-(-total // size)):
                wanted = digests[index * size : min((index + 1) * size, total)]
                there = self.device[request.block_ids[index]][: len(wanted)]
                assert there == wanted, f"{request.request_id} reads another text's keys"

    def _digests_of(self, request: Request, count: int) -> Keys:
        digests = self._digests.setdefault(request, [])
        num_prompt = request.num_prompt_tokens
        while len(digests) < count:
            position = len(digests)
            token = request.prompt_token_ids[position] if position < num_prompt else 1000 + position - num_prompt
            before = digests[-1] if digests else hash((request.cache_salt, self.weights))
            digests.append(hash((before, token)))
        return digests

    def _read(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        for request in plan.decodes + [chunk.request for chunk in plan.chunks if chunk.samples]:
            request.num_inflight -= 1
            assert request.num_inflight >= 0
            if request.is_finished:
                continue
            request.append(1000 + len(request.output_token_ids))
            if request.num_tokens >= request.max_total_tokens or (
                    len(request.output_token_ids) == self.stops.get(request)):
                self.scheduler.finish(request)
