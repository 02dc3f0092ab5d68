"""Host memory as the scheduler sees it: single cases; random programs are in test_state_machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.request import Request, RequestStatus, SamplingParams
from jaxserve.scheduling.host_tier import HostMemory
from jaxserve.scheduling.move_costs import MOVE_BATCH, MoveCosts
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduling.model_device import ModelDevice

CHEAP = MoveCosts(block_bytes=1, token_flops=1.0, link_bytes_per_s=1e9, flops_per_s=1.0, dispatch_s=0.0)


def made(num_host_blocks: int = 20, costs: MoveCosts = CHEAP, mode: Any = "swap",
         **options: Any) -> tuple[Scheduler, ModelDevice]:
    defaults: dict[str, Any] = dict(num_blocks=7, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
                                    max_blocks_per_seq=16)
    memory = HostMemory(num_blocks=num_host_blocks, costs=costs, preemption_mode=mode)
    scheduler = Scheduler(**(defaults | options), host_memory=memory)
    return scheduler, ModelDevice(scheduler)


def request(name: str, tokens: list[int], num_new: int = 10, **options: Any) -> Request:
    return Request(name, tokens, SamplingParams(), len(tokens) + num_new, **options)


def run(device: ModelDevice, *requests: Request) -> list[StepPlan]:
    """To their ends; their steps."""
    for each in requests:
        device.scheduler.add(each)
    plans = []
    while device.scheduler.has_requests:
        plans.append(device.step())
        device.note_swapped()
        device.check()
    plans.append(device.step())
    return plans


def test_a_swapped_request_goes_on_where_it_was() -> None:
    scheduler, device = made()
    old, new = request("old", [1] * 8), request("new", [2] * 8)
    plans = run(device, old, new)
    assert new.num_preemptions == 1 and old.num_preemptions == 0
    assert sum(plan.num_tokens for plan in plans) == 2 * (8 + 10 - 1), "each token is computed once"
    back, = [chunk for plan in plans for chunk in plan.chunks if chunk.enters and chunk.start]
    assert back.request is new and back.num_tokens == 1 and back.samples
    assert scheduler.host is not None
    assert scheduler.host.num_blocks_out == scheduler.host.num_blocks_back == -(-back.start // 4)
    assert scheduler.host.pool.num_free == 20


def test_without_room_on_the_host_it_computes_again() -> None:
    scheduler, device = made(num_host_blocks=1)
    old, new = request("old", [1] * 8), request("new", [2] * 8)
    plans = run(device, old, new)
    assert scheduler.host is not None and scheduler.host.num_swapped == 0 < new.num_preemptions
    assert sum(plan.num_tokens for plan in plans) > 2 * (8 + 10 - 1)


def test_the_cheaper_way_is_taken() -> None:
    """Three blocks there and back take 6 s; nine tokens, the prompt's and one more, 9 s or, twice as fast, 4.5 s."""
    for flops_per_s, swaps in ((1.0, 1), (2.0, 0)):
        costs = replace(CHEAP, link_bytes_per_s=1.0, flops_per_s=flops_per_s)
        scheduler, device = made(costs=costs, mode="auto", num_blocks=6)
        run(device, request("old", [1] * 8, 8), request("new", [2] * 8, 8))
        assert scheduler.host is not None and scheduler.num_preemptions == 1
        assert scheduler.host.num_swapped == swaps


def test_costs_are_straight_lines_with_a_start_for_each_batch() -> None:
    costs = MoveCosts(block_bytes=2_000_000, token_flops=16e9, link_bytes_per_s=20e9, flops_per_s=2e14, dispatch_s=1e-3)
    assert costs.move_s(1) == pytest.approx(1e-3 + 1e-4)
    assert costs.move_s(MOVE_BATCH + 1) == pytest.approx(2e-3 + (MOVE_BATCH + 1) * 1e-4)
    assert costs.move_s(0) == 0
    assert costs.compute_s(100) == pytest.approx(8e-3)
    assert costs.swap_is_cheaper(num_blocks_out=7, num_blocks_back=7, num_tokens=112)
    assert not costs.swap_is_cheaper(num_blocks_out=7, num_blocks_back=7, num_tokens=40)
    assert costs.fetch_is_cheaper(num_blocks=7, num_tokens=40)
    assert not costs.fetch_is_cheaper(num_blocks=1, num_tokens=9)


def test_completions_of_one_prompt_are_copied_once() -> None:
    scheduler, device = made(enable_prefix_caching=True, num_blocks=12)
    siblings = [request(str(i), [*range(17)]) for i in range(3)]
    for each in siblings:
        scheduler.add(each)
    device.step()
    device.step()
    scheduler._preempt(siblings[1])
    scheduler._preempt(siblings[2])
    assert scheduler.host is not None
    out, _ = scheduler.host.take_moves()
    assert len(out) == 4 + 2, "the prompt's four full blocks, and the last block of each"
    first, second = siblings[1].host_block_ids, siblings[2].host_block_ids
    assert first[:4] == second[:4] and first[4] != second[4]
    device.move(StepPlan(swap_out=out))
    device.note_swapped()
    device.check()
    back = [move for _ in range(3) for move in device.step().swap_in]
    assert len(back) == 2, "what the first one still has on the device is shared"


def test_evicted_blocks_are_found_on_the_host() -> None:
    scheduler, device = made(enable_prefix_caching=True)
    run(device, request("a", [1] * 13, 1))
    run(device, request("b", [2] * 23, 1))  # 6 blocks: all
    assert scheduler.pool.num_evictions == 3 and scheduler.host is not None and scheduler.host.pool.num_cached == 3
    again = request("a again", [1] * 13, 1)
    plans = run(device, again)
    assert [(chunk.start, chunk.num_tokens) for plan in plans for chunk in plan.chunks] == [(12, 1)]
    assert again.num_cached_tokens == 12 and scheduler.host.num_blocks_back == 3
    out = scheduler.host.num_blocks_out
    run(device, request("c", [3] * 23, 1))  # evicts a's three blocks, and two of b's five
    assert scheduler.host.num_blocks_out == out + 2, "a's are on the host already"


def test_fetching_has_to_pay() -> None:
    scheduler, device = made(enable_prefix_caching=True, costs=replace(CHEAP, flops_per_s=1e12))
    run(device, request("a", [1] * 13, 1))
    run(device, request("b", [2] * 23, 1))
    again = request("a again", [1] * 13, 1)
    run(device, again)
    assert again.num_cached_tokens == 0 and scheduler.host is not None and scheduler.host.num_blocks_back == 0


def test_a_swapped_request_s_claim_goes_before_cached_blocks() -> None:
    """Four host blocks, three of them cached: the swapped request takes what it needs."""
    scheduler, device = made(num_host_blocks=4, enable_prefix_caching=True)
    run(device, request("a", [1] * 13, 1))
    run(device, request("b", [2] * 23, 1))
    assert scheduler.host is not None and scheduler.host.pool.num_cached == 3
    victim = request("victim", [4] * 14)
    scheduler.add(victim)
    device.step()
    device.step()
    scheduler._preempt(victim)
    assert len(victim.host_block_ids) == scheduler.host.pool.num_used == 4
    scheduler.check_integrity()
    scheduler.finish(victim)
    scheduler.check_integrity()
    assert scheduler.host.pool.num_used == 0 and victim.status is RequestStatus.FINISHED


def test_another_salt_or_other_weights_fetch_nothing() -> None:
    scheduler, device = made(enable_prefix_caching=True)
    run(device, request("a", [1] * 13, 1))
    run(device, request("b", [2] * 23, 1))
    salted = request("salted", [1] * 13, 1, cache_salt="x")
    run(device, salted)
    assert salted.num_cached_tokens == 0
    device.new_weights()
    assert scheduler.host is not None and scheduler.host.pool.num_cached == 0
    after = request("after", [1] * 13, 1)
    run(device, after)
    assert after.num_cached_tokens == 0


def test_the_check_sees_a_shared_block_that_may_be_written_to() -> None:
    scheduler, device = made(num_blocks=20)
    first, second = request("a", [1] * 6), request("b", [1] * 6)
    scheduler.add(first)
    scheduler.add(second)
    device.step()
    scheduler.check_integrity()
    lost = second.block_ids.pop()
    scheduler.pool.free([lost])
    second.block_ids.append(first.block_ids[-1])
    scheduler.pool.share([first.block_ids[-1]])
    assert second.slot is not None
    scheduler.block_tables[second.slot, :2] = second.block_ids
    with pytest.raises(AssertionError, match="which it shares"):
        scheduler.check_integrity()
