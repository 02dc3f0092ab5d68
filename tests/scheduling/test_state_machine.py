"""BlockPool and Scheduler under random programs of operations, checked after each against models of what they manage.

A program is a list of 60 numbers, each read as an operation and its arguments: a state machine whose examples are cheap
enough for thousands, and which Hypothesis can still shrink."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.request import Request, RequestStatus, SamplingParams
from jaxserve.scheduling.block_pool import BlockPool
from jaxserve.scheduling.host_tier import HostMemory, PreemptionMode
from jaxserve.scheduling.limits import PrefillLimits
from jaxserve.scheduling.move_costs import MoveCosts
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduling.model_device import ModelDevice

NUM_STEPS = 60
EXAMPLES = 2000
PROGRAMS = st.lists(st.integers(0, 2**24 - 1), min_size=NUM_STEPS, max_size=NUM_STEPS)
PLAIN, ALL_LOGPROBS = SamplingParams(), SamplingParams(prompt_logprobs=0)
SIZE = 4


def repeats(count: int) -> Any:
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)


class Word:
    """Small numbers cut from one."""

    def __init__(self, value: int):
        self._value = value

    def below(self, count: int) -> int:
        self._value, found = divmod(self._value, count)
        return found


class PoolMachine:
    """Lists of blocks with holders, and what each named block holds."""

    def __init__(self, num_blocks: int):
        self.pool = BlockPool(num_blocks)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.evicted: list[bytes] = []
        self.pool.on_evict = self.on_evict

    def on_evict(self, block_id: int, name: bytes) -> None:
        assert self.content.pop(block_id) == name
        self.evicted.append(name)

    def allocate(self, word: Word) -> None:
        count, free = word.below(4), self.pool.num_free
        block_ids = self.pool.allocate(count)
        assert (block_ids is None) == (count > free)
        if block_ids is not None:
            assert len(set(block_ids)) == count and 0 not in block_ids
            self.holders.append(block_ids)

    def fork(self, word: Word) -> None:
        if self.holders:
            shared = list(self.holders[word.below(len(self.holders))])
            self.pool.share(shared)
            self.holders.append(shared)

    def append(self, word: Word) -> None:
        """A holder's blocks are full."""
        if self.holders:
            for block_id in self.holders[word.below(len(self.holders))]:
                name = bytes([word.below(20)])
                if block_id not in self.content:
                    assert self.pool.name(block_id, name) == (name not in self.content.values())
                    if self.pool.name_of(block_id) is not None:
                        self.content[block_id] = name

    def free(self, word: Word) -> None:
        if self.holders:
            self.pool.free(self.holders.pop(word.below(len(self.holders))))

    def find(self, word: Word) -> None:
        names = [bytes([word.below(20)]) for _ in range(1 + word.below(3))]
        found = self.pool.find(names)
        assert [self.content[block_id] for block_id in found] == names[: len(found)]
        assert len(found) == len(names) or names[len(found)] not in self.content.values()
        self.pool.share(found)
        self.holders.append(found)

    def forget(self, word: Word) -> None:
        block_id = 1 + word.below(self.pool.num_blocks - 1)
        self.pool.forget([block_id])
        self.content.pop(block_id, None)

    def check(self) -> None:
        pool = self.pool
        pool.check_integrity(self.holders)
        assert not pool.unexplained(self.holders)
        used = {block_id for held in self.holders for block_id in held}
        cached = self.content.keys() - used
        assert (pool.num_used, pool.num_cached) == (len(used), len(cached))
        assert pool.num_used + pool.num_free == pool.num_blocks - 1
        assert {b: name for b in range(pool.num_blocks) if (name := pool.name_of(b)) is not None} == self.content
        assert pool.num_evictions == len(self.evicted)


def run_pool(num_blocks: int, program: list[int]) -> None:
    machine = PoolMachine(num_blocks)
    operations = [machine.allocate, machine.allocate, machine.fork, machine.append, machine.append, machine.free,
                  machine.free, machine.find, machine.forget]
    for value in program:
        word = Word(value)
        operations[word.below(len(operations))](word)
        machine.check()


@repeats(EXAMPLES)
@given(st.integers(2, 9), PROGRAMS)
def test_block_pool(num_blocks: int, program: list[int]) -> None:
    run_pool(num_blocks, program)


@pytest.mark.slow
@repeats(50_000)
@given(st.integers(2, 9), PROGRAMS)
def test_block_pool_for_long(num_blocks: int, program: list[int]) -> None:
    run_pool(num_blocks, program)


class SchedulerMachine:
    """Requests of few beginnings in a pool that holds one or two of them."""

    def __init__(self, options: int):
        word = Word(options)
        num_seqs, modes = 1 + word.below(4), ("auto", "swap", "recompute")
        mode: PreemptionMode = modes[word.below(3)]  # type: ignore[assignment]
        costs = MoveCosts(block_bytes=1, token_flops=1, link_bytes_per_s=1, flops_per_s=1 + word.below(2), dispatch_s=0)
        num_host = word.below(9)
        limits = PrefillLimits()
        if word.below(3) == 0:
            limits = PrefillLimits(long_prefill_token_threshold=1 + word.below(6),
                                   max_num_partial_prefills=1 + word.below(2), max_long_partial_prefills=1)
        self.capacity = SIZE * (7 + word.below(4))
        self.scheduler = Scheduler(
            num_blocks=self.capacity // SIZE + 1, block_size=SIZE, max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + word.below(16), max_blocks_per_seq=9,
            enable_prefix_caching=word.below(4) > 0, policy="priority" if word.below(3) == 0 else "fcfs",
            prefill_limits=limits,
            host_memory=HostMemory(num_blocks=num_host, costs=costs, preemption_mode=mode) if num_host else None)
        self.device = ModelDevice(self.scheduler, overlap=word.below(3) > 0)
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()
        self.num_preemptions = self.num_out = self.num_in = 0

    def add(self, word: Word) -> None:
        num_prompt, num_new, first = 1 + word.below(16), 1 + word.below(10), word.below(2)
        prompt = [first, *range(1, num_prompt)]
        for _ in range(1 + (word.below(4) == 0) * 2):  # one, or three completions of a prompt
            request = Request(
                str(len(self.requests)), prompt, ALL_LOGPROBS if word.below(8) == 0 else PLAIN, num_prompt + num_new,
                needs_host_tokens=word.below(4) == 0, cache_salt="salt" if word.below(6) == 0 else None,
                priority=word.below(3))
            if word.below(4) == 0:
                self.device.stops[request] = 1 + word.below(5)
            self.requests.append(request)
            self.scheduler.add(request)

    def step(self, word: Word) -> None:
        for _ in range(1 + word.below(3)):
            self.device.step()
            self.device.note_swapped()

    def postponed_step(self, word: Word) -> None:
        """The engine waits for the compiler with a plan in hand; meanwhile requests end."""
        plan = self.device.plan()
        self.device.note_swapped()
        self.device.drain()
        if word.below(2):
            self.abort(word)
        self.scheduler.revise(plan)
        self.device.note_swapped()
        self.device.check(set(plan.published))
        self.device.step(plan)

    def abort(self, word: Word) -> None:
        requests = list(self.scheduler.requests())
        if requests:
            victim = requests[word.below(len(requests))]
            self.scheduler.finish(victim)
            self.aborted.add(victim)

    def preempt(self, word: Word) -> None:
        if self.scheduler.running:
            self.scheduler._preempt(self.scheduler.running[word.below(len(self.scheduler.running))])
            if self.scheduler.host is not None:
                out, back = self.scheduler.host.take_moves()
                self.device.move(StepPlan(swap_out=out, swap_in=back))
            self.device.note_swapped()

    def new_weights(self, word: Word) -> None:
        if word.below(3) == 0:
            self.device.new_weights()

    def finish(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_requests:
                break
            self.device.step()
            self.device.note_swapped()
        assert not self.scheduler.has_requests, "requests are stuck"
        self.device.drain()
        self.device.check()
        assert self.scheduler.pool.num_used == 0
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED
            if request not in self.aborted:
                num_new = request.max_total_tokens - request.num_prompt_tokens
                assert request.output_token_ids == [
                    1000 + i for i in range(min(num_new, self.device.stops.get(request, num_new)))], "lost or doubled"


def run_scheduler(options: int, program: list[int]) -> SchedulerMachine:
    machine = SchedulerMachine(options)
    operations = [machine.add, machine.add, machine.step, machine.step, machine.step, machine.postponed_step,
                  machine.abort, machine.preempt, machine.new_weights]
    for value in program:
        word = Word(value)
        operations[word.below(len(operations))](word)
        machine.device.check()
    machine.finish()
    return machine


@repeats(EXAMPLES)
@given(st.integers(0, 2**32), PROGRAMS)
def test_scheduler(options: int, program: list[int]) -> None:
    run_scheduler(options, program)


@pytest.mark.slow
@repeats(50_000)
@given(st.integers(0, 2**32), PROGRAMS)
def test_scheduler_for_long(options: int, program: list[int]) -> None:
    run_scheduler(options, program)
