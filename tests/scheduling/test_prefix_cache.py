"""Shared beginnings: what is found, what is not, and what happens to it when memory is short."""

from __future__ import annotations

import pytest

from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling import prefix_cache
from jaxserve.scheduling.report import memory_report
from jaxserve.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import Device


def small(**options) -> tuple[Scheduler, Device]:
    defaults = dict(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_blocks_per_seq=16,
                    enable_prefix_caching=True)
    scheduler = Scheduler(**(defaults | options))
    return scheduler, Device(scheduler)


def request(name: str, tokens: list[int], num_new: int = 2, params: SamplingParams | None = None, **options) -> Request:
    return Request(name, tokens, params or SamplingParams(), len(tokens) + num_new, **options)


def run(device: Device, *requests: Request) -> list[tuple[int, int]]:
    """Adds and runs them to their ends; the (start, tokens) of every chunk."""
    for each in requests:
        device.scheduler.add(each)
    chunks = []
    while device.scheduler.has_requests:
        chunks += [(chunk.start, chunk.num_tokens) for chunk in device.step().chunks]
    device.step()
    return chunks


def test_a_prompt_that_is_wholly_cached_computes_its_last_block() -> None:
    """Blocks of 4: a prompt of 8 twice, then one of 12 that begins with it (fault H14)."""
    scheduler, device = small()
    first, second, third = (request(name, list(range(n))) for name, n in (("a", 8), ("b", 8), ("c", 12)))
    assert run(device, first) == [(0, 8)]
    free = scheduler.pool.num_free
    assert run(device, second) == [(4, 4)] and second.num_cached_tokens == 4
    assert run(device, third) == [(8, 4)] and third.num_cached_tokens == 8
    assert scheduler.pool.num_free == free == 19
    stats = scheduler.prefixes.stats
    assert (stats.queries, stats.hits) == (8 + 8 + 12, 4 + 8)


def test_the_same_step_shares_what_it_computes() -> None:
    """Four equal prompts of 18 tokens: 16 are computed once."""
    scheduler, device = small()
    requests = [request(str(i), list(range(18))) for i in range(4)]
    for each in requests:
        scheduler.add(each)
    plan = device.step()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(0, 18)] + [(16, 2)] * 3
    assert scheduler.pool.num_used == 4 + 4
    assert len({each.block_ids[-1] for each in requests}) == 4, "blocks that are written to are nobody else's"


def test_what_differs_is_not_found() -> None:
    _, device = small(num_blocks=60)
    run(device, request("a", [*range(8), 1, 2, 3, 4, 5]))
    assert run(device, request("one token of the first block", [9, *range(1, 8), 1, 2, 3, 4, 5])) == [(0, 13)]
    assert run(device, request("of the second", [*range(7), 9, 1, 2, 3, 4, 5])) == [(4, 9)]
    assert run(device, request("another salt", [*range(8), 1], cache_salt="s")) == [(0, 9)]
    assert run(device, request("the same salt", [*range(8), 1], cache_salt="s")) == [(8, 1)]
    same_block_elsewhere = [*range(4, 8), *range(4, 8), 1]
    assert run(device, request("second block first", same_block_elsewhere)) == [(0, 9)]


def test_prompt_logprobs_compute_every_position() -> None:
    _, device = small()
    run(device, request("a", list(range(9))))
    wants = request("b", list(range(9)), params=SamplingParams(prompt_logprobs=0))
    assert run(device, wants) == [(0, 9)] and wants.num_cached_tokens == 0


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler, device = small()
    first = request("a", list(range(6)), num_new=8)
    run(device, first)
    turn = request("b", [*range(6), *first.output_token_ids, 50, 51])
    assert run(device, turn) == [(12, 4)]
    assert scheduler.prefixes.stats.hits == 12


def test_the_longest_unused_goes_first_and_ends_before_beginnings() -> None:
    scheduler, device = small(num_blocks=9)
    run(device, request("a", [1] * 9, num_new=1), request("b", [2] * 9, num_new=1))
    run(device, request("a again", [1] * 9, num_new=1))
    assert scheduler.pool.num_cached == 4
    run(device, request("c", [3] * 20, num_new=1))  # 5 blocks: 4 are free, one of b's is evicted
    assert scheduler.pool.num_evictions == 1
    held = {n: len(scheduler.prefixes.match(request("asked", [n] * 9))) for n in (1, 2, 3)}
    assert held == {1: 2, 2: 1, 3: 2}, "of b the second block went, not the first"


def test_blocks_in_use_are_never_evicted() -> None:
    scheduler, device = small(num_blocks=9)
    live = request("live", [1] * 9, num_new=20)
    scheduler.add(live)
    device.step()
    for name in range(6):
        scheduler.add(request(str(name), [10 + name] * 9, num_new=1))
    while scheduler.has_requests:
        device.step()  # the Device looks at what everybody reads
    assert len(live.output_token_ids) == 20


def test_a_preempted_request_finds_what_was_not_evicted() -> None:
    scheduler, device = small(num_blocks=8)
    old, new = request("old", [1] * 8, 12), request("new", [2] * 8, 12)
    chunks = run(device, old, new)
    assert new.num_preemptions > 0
    assert any(start > 0 for start, _ in chunks[2:]), "it starts from 0 again"
    assert scheduler.prefixes.stats.queries == 16, "coming back is no query"


def test_new_weights_find_nothing() -> None:
    scheduler, device = small()
    run(device, request("a", list(range(9))))
    scheduler.recompute_all()
    assert run(device, request("b", list(range(9)))) == [(0, 9)]
    assert run(device, request("c", list(range(9)))) == [(8, 1)]


def test_a_plan_that_loses_a_chunk_computes_all_of_them_again() -> None:
    """The second request counts on blocks that the first, gone before the plan ran, would have filled."""
    scheduler, device = small()
    first, second = request("a", list(range(9))), request("b", list(range(9)))
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert plan.chunks[1].start == 8
    scheduler.finish(first)
    scheduler.revise(plan)
    assert plan.is_empty and scheduler.pool.num_cached == 0 and scheduler.pool.num_used == 0
    assert second.num_inflight == 0 and second.num_cached_tokens == second.num_preemptions == 0
    assert (scheduler.prefixes.stats.queries, scheduler.prefixes.stats.hits) == (9, 0)
    scheduler.check_integrity()
    chunks = []
    while scheduler.has_requests:
        chunks += [(chunk.start, chunk.num_tokens) for chunk in device.step().chunks]
    assert chunks == [(0, 9)]


def test_without_it_nothing_is_shared() -> None:
    scheduler, device = small(enable_prefix_caching=False)
    assert run(device, request("a", list(range(9))), request("b", list(range(9)))) == [(0, 9), (0, 9)]
    assert scheduler.pool.num_cached == 0


@pytest.mark.parametrize("fault", ["names without what is before", "one block too many"])
def test_faults_are_seen_by_these_tests(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.startswith("names"):
        def digest(text: bytes, digest_size: int) -> object:
            return original(text.split(b"|", 1)[1], digest_size=digest_size)

        original = prefix_cache.blake2b
        monkeypatch.setattr(prefix_cache, "blake2b", digest)
    else:
        match = prefix_cache.PrefixCache.match
        monkeypatch.setattr(prefix_cache.PrefixCache, "match", lambda self, request: match(self, request) and [
            *match(self, request), 7])
    _, device = small()
    with pytest.raises(AssertionError):
        run(device, request("a", [*range(4), *range(4), 9]))
        run(device, request("b", [*range(8, 12), *range(4), 9, 9, 9, 9, 9]))
        run(device, request("c", [*range(4), *range(4), 9]))
        raise RuntimeError("nothing was seen")


def test_the_report_says_who_holds_what() -> None:
    scheduler, device = small()
    for name in ("a", "b"):
        scheduler.add(request(name, list(range(10)), num_new=6))
    device.step()
    report = memory_report(scheduler)
    assert report.owners == {"a": 3, "b": 3} and (report.num_used, report.num_shared) == (4, 2)
    assert report.waste == pytest.approx(1 - (8 + 2 * 2) / 16)
    assert report.num_blocks == 19 == report.num_used + report.num_cached + report.num_empty
    while scheduler.has_requests:
        device.step()
    report = memory_report(scheduler)
    assert (report.num_used, report.owners, report.waste) == (0, {}, 0.0) and report.num_cached > 0
    assert report.hit_rate == 8 / 20
