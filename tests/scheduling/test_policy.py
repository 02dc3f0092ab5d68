"""Ranks: who goes first, who makes room, and that nobody starves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidInputError
from jaxserve.request import Request, RequestStatus, SamplingParams
from jaxserve.scheduling.policy import PriorityWeights, WaitingQueue
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import Device


def small(**options) -> tuple[Scheduler, Device]:
    defaults: dict[str, Any] = dict(
        num_blocks=40, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_blocks_per_seq=16,
        policy="priority", priority_weights=PriorityWeights(waiting=1.0))
    scheduler = Scheduler(**(defaults | options))
    return scheduler, Device(scheduler)


def request(name: str, *, prompt: int = 4, new: int = 8, **options) -> Request:
    return Request(name, [hash(name) % 50] * prompt, SamplingParams(), prompt + new, **options)


def order_of_starts(scheduler: Scheduler, device: Device) -> list[str]:
    started: list[str] = []
    while scheduler.has_requests:
        started += [chunk.request.request_id for chunk in device.step().chunks
                    if chunk.request.request_id not in started]
    return started


def test_lower_numbers_go_first_and_equal_ones_as_they_came() -> None:
    scheduler, device = small(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        scheduler.add(request(name, priority=priority))
    assert order_of_starts(scheduler, device) == ["d", "b", "a", "c"]


def test_first_come_first_served_looks_at_nothing_else() -> None:
    scheduler, device = small(max_num_seqs=1, policy="fcfs")
    for name, priority in (("a", 1), ("b", 0), ("c", -5)):
        scheduler.add(request(name, priority=priority))
    assert order_of_starts(scheduler, device) == ["a", "b", "c"]


@pytest.mark.parametrize(("weights", "first"), [
    (PriorityWeights(waiting=1.0), "old"),
    (PriorityWeights(waiting=1.0, business_value=2.0), "dear"),
    (PriorityWeights(waiting=1.0, expected_latency=-1.0, business_value=0.0), "short"),
    (PriorityWeights(waiting=1.0, expected_latency=1.0, business_value=0.0), "long"),
])
def test_each_weight_counts(weights: PriorityWeights, first: str) -> None:
    scheduler, device = small(max_num_seqs=1, priority_weights=weights)
    scheduler.add(request("short", new=2, arrival_time_s=3.0))
    scheduler.add(request("long", new=30, arrival_time_s=3.0))
    scheduler.add(request("dear", arrival_time_s=3.0, business_value=2.0))
    scheduler.add(request("old", arrival_time_s=0.5))
    assert order_of_starts(scheduler, device)[0] == first


def test_an_urgent_request_starts_in_the_next_step_though_all_is_taken() -> None:
    """No free slot; then no free block."""
    for options in (dict(), dict(max_num_seqs=4, num_blocks=7)):
        scheduler, device = small(**options)
        for index in range(6):
            scheduler.add(request(f"low {index}", prompt=8, new=8, priority=5))
        for _ in range(4):
            device.step()
        urgent = request("urgent", prompt=8, new=4, priority=-5)
        scheduler.add(urgent)
        plan = device.step()
        assert [chunk.request for chunk in plan.chunks if chunk.request is urgent], "it waits"
        assert plan.preempted and urgent not in plan.preempted
        while scheduler.has_requests:
            device.step()
        assert urgent.num_preemptions == 0 and len(urgent.output_token_ids) == 4


def test_an_urgent_request_goes_ahead_of_a_long_prompt() -> None:
    """There are slots and blocks enough; the long prompt would take the whole budget for many steps."""
    scheduler, device = small(num_blocks=200, max_blocks_per_seq=64, max_num_seqs=4)
    scheduler.add(request("long", prompt=200, priority=5))
    device.step()
    device.step()
    urgent = request("urgent", prompt=8, priority=-5)
    scheduler.add(urgent)
    plan = device.step()
    assert [chunk.request.request_id for chunk in plan.chunks] == ["urgent", "long"]
    assert plan.chunks[0].samples and plan.num_tokens == 16


def test_a_running_request_is_not_held_up_by_one_behind_it() -> None:
    """The low one came first and decodes; the high one needs its blocks."""
    scheduler, device = small(num_blocks=9, max_num_seqs=2)
    scheduler.add(request("low", prompt=8, new=20, priority=5))
    device.step()
    high = request("high", prompt=8, new=20, priority=0)
    scheduler.add(high)
    device.step()
    while high.status is not RequestStatus.FINISHED:
        plan = device.step()
        assert high in plan.rows() or high.num_tokens + high.num_inflight >= high.max_total_tokens
    assert high.num_preemptions == 0


def test_who_makes_room_is_the_last_in_rank() -> None:
    scheduler, device = small()
    middle, last = request("middle", priority=2), request("last", priority=3)
    scheduler.add(middle)
    scheduler.add(last)
    device.step()
    scheduler.add(request("equal to the last", priority=3))
    assert not device.step().preempted
    scheduler.add(request("urgent", priority=1))
    assert device.step().preempted == [last]


def test_nobody_starves() -> None:
    """A request of rank 10 among ever new ones of rank 0: passed only by those of the next 10 seconds."""
    scheduler, device = small(max_num_seqs=1, priority_weights=PriorityWeights(waiting=1.0))
    low = request("low", new=1, priority=10, arrival_time_s=0.0)
    scheduler.add(low)
    seconds = 0
    while low.status is not RequestStatus.FINISHED and seconds < 100:
        scheduler.add(request(f"high {seconds}", new=1, priority=0, arrival_time_s=float(seconds)))
        device.step()
        device.step()  # the server is just fast enough for the new ones
        seconds += 1
    assert 10 <= seconds <= 13


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "forget", "again"]), st.integers(0, 30)), max_size=60))
@settings(max_examples=200, deadline=None)
def test_the_queue_is_a_sorted_list(operations) -> None:
    queue, model, popped = WaitingQueue(lambda request: request.priority), [], []
    for number, (name, value) in enumerate(operations):
        if name == "add":
            new = request(str(number), priority=value % 4)
            queue.add(new)
            model.append(new)
            model.sort(key=lambda each: (each.priority, int(each.request_id)))
        elif name == "pop" and model:
            popped.append(model.pop(0))
            assert queue.pop() is popped[-1]
        elif name == "forget" and model:
            queue.forget(model.pop(value % len(model)))
        elif name == "again" and popped:
            back = popped.pop(value % len(popped))
            queue.add(back)
            model.append(back)
            model.sort(key=lambda each: (each.priority, int(each.request_id)))
        assert list(queue) == model and len(queue) == len(model)
        assert queue.first() is (model[0] if model else None)


def test_those_who_left_take_no_room() -> None:
    queue = WaitingQueue(lambda request: 0.0)
    stays = request("stays")
    queue.add(stays)
    for number in range(1000):
        gone = request(str(number))
        queue.add(gone)
        queue.forget(gone)
    assert len(queue._heap) < 100 and len(queue._places) == 1 and queue.pop() is stays


@pytest.mark.parametrize("options", [dict(waiting=0), dict(waiting=-1.0), dict(business_value=math.nan),
                                     dict(expected_latency="x")])
def test_bad_weights(options) -> None:
    with pytest.raises(InvalidInputError, match=f"priority_weights.{next(iter(options))}"):
        PriorityWeights(**options)
