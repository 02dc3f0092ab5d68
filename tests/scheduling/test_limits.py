"""Long prompts that share steps, and batches that wait to be filled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.errors import InvalidInputError
from jaxserve.request import Request
from jaxserve.scheduling.limits import BatchDelay, PrefillLimits
from jaxserve.scheduling.scheduler import Scheduler
from tests.conftest import TINY_OPTIONS
from tests.scheduling.model_device import ModelDevice


def made(**limits: Any) -> tuple[Scheduler, ModelDevice]:
    scheduler = Scheduler(num_blocks=200, block_size=4, max_num_seqs=8, max_num_batched_tokens=32,
                          max_blocks_per_seq=32, prefill_limits=PrefillLimits(**limits))
    return scheduler, ModelDevice(scheduler, overlap=False)


def request(name: str, num_prompt: int) -> Request:
    return Request(name, [ord(name[0])] * num_prompt, SamplingParams(), num_prompt + 4)


def chunks(device: ModelDevice, *requests: Request) -> list[list[tuple[str, int]]]:
    """Of each step until all prompts are computed: whose, and how many tokens."""
    for each in requests:
        device.scheduler.add(each)
    found = []
    while any(each.num_tokens == each.num_prompt_tokens for each in requests):
        found.append([(chunk.request.request_id, chunk.num_tokens) for chunk in device.step().chunks])
        device.check()
    return found


def test_without_limits_the_first_prompt_takes_the_step() -> None:
    _, device = made()
    assert chunks(device, request("a", 70), request("b", 5)) == [[("a", 32)], [("a", 32)], [("a", 6), ("b", 5)]]


def test_a_long_prompt_takes_no_more_than_the_threshold() -> None:
    _, device = made(long_prefill_token_threshold=10)
    found = chunks(device, request("a", 25), request("b", 10), request("c", 12))
    assert found == [[("a", 10), ("b", 10), ("c", 10)], [("a", 10), ("c", 2)], [("a", 5)]]


def test_shorter_prompts_go_ahead_of_a_second_long_one() -> None:
    scheduler, device = made(long_prefill_token_threshold=10, max_long_partial_prefills=1)
    a, b, c = request("a", 25), request("b", 25), request("c", 4)
    found = chunks(device, a, b, c)
    assert found == [[("a", 10), ("c", 4)], [("a", 10)], [("a", 5), ("b", 10)], [("b", 10)], [("b", 5)]]
    assert [each.request_id for each in scheduler.running] == ["a", "b"], "c has ended; the order is that of arrival"


def test_so_many_prompts_are_unfinished_at_most() -> None:
    _, device = made(long_prefill_token_threshold=4, max_num_partial_prefills=2)
    found = chunks(device, *(request(name, 8) for name in "abcd"))
    assert found == [[("a", 4), ("b", 4)], [("a", 4), ("b", 4), ("c", 4), ("d", 4)], [("c", 4), ("d", 4)]]


def test_limits_hold_for_any_mixture() -> None:
    limits = dict(long_prefill_token_threshold=6, max_num_partial_prefills=3, max_long_partial_prefills=2)
    scheduler, device = made(**limits)
    everybody = [request(name, 3 + 7 * i % 40) for i, name in enumerate("abcdefghijklmnop")]
    for each in everybody:
        scheduler.add(each)
    while scheduler.has_requests:
        plan = device.step()
        assert all(chunk.num_tokens <= 6 for chunk in plan.chunks)
        partial = [each for each in scheduler.running if each.num_computed_tokens < each.num_prompt_tokens]
        assert len(partial) <= 3 and sum(each.num_prompt_tokens > 6 for each in partial) <= 2
    assert all(len(each.output_token_ids) == 4 for each in everybody)


def test_a_batch_is_held_only_while_it_may_get_better() -> None:
    delay = BatchDelay(max_queue_delay_s=2.0, preferred_batch_size=3)
    assert delay.left_s(10.0, num_running=0, num_waiting=0) == 0, "nobody waits"
    assert delay.left_s(11.0, num_running=0, num_waiting=1) == 2.0
    assert delay.left_s(12.5, num_running=0, num_waiting=2) == 0.5, "from when the first could have run"
    assert delay.left_s(12.6, num_running=0, num_waiting=3) == 0, "as many as preferred"
    assert delay.left_s(20.0, num_running=1, num_waiting=1) == 0, "something runs"
    assert delay.left_s(30.0, num_running=0, num_waiting=1) == 2.0
    assert delay.left_s(32.0, num_running=0, num_waiting=1) == 0
    assert delay.left_s(33.0, num_running=0, num_waiting=1) == 0, "it is late whenever it is asked again"


def test_a_lonely_request_starts_after_the_delay(tiny_folder: Path) -> None:
    few = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(str(tiny_folder), **TINY_OPTIONS, max_queue_delay_ms=300) as llm:
        llm.warmup()
        start = time.monotonic()
        output, = llm.generate([[5, 6]], few, use_tqdm=False)
        assert time.monotonic() - start >= 0.3 and len(output.outputs[0].token_ids) == 2
        assert output.metrics.queue_s is not None and output.metrics.queue_s >= 0.3
        outputs = llm.generate([[5, 6]] * 4, few, use_tqdm=False)
        assert all((each.metrics.queue_s or 0) < 0.3 for each in outputs), "a full batch was held"


def test_requests_that_come_during_the_delay_start_together(tiny_folder: Path) -> None:
    """The second makes the batch as large as preferred, long before the delay of a minute."""
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS, max_queue_delay_ms=60_000, preferred_batch_size=2)
        few = SamplingParams(max_tokens=2, ignore_eos=True)

        async def one(wait_s: float) -> Any:
            await asyncio.sleep(wait_s)
            return [output async for output in llm.generate([5, 6], few)][-1].metrics

        try:
            first, second = await asyncio.wait_for(asyncio.gather(one(0), one(0.2)), 30)
            assert first.first_scheduled_time_s >= second.arrival_time_s
            held = asyncio.create_task(one(0))
            await asyncio.sleep(0.1)
            held.cancel()  # whoever gives up while held leaves nothing behind
            await asyncio.sleep(0.1)
            assert not llm._engine.scheduler.has_requests
        finally:
            llm.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("options", [
    dict(long_prefill_token_threshold=-1), dict(long_prefill_token_threshold=1.5), dict(max_num_partial_prefills=0),
    dict(max_long_partial_prefills=1), dict(max_queue_delay_ms=-1), dict(max_queue_delay_ms="5"),
    dict(preferred_batch_size=0), dict(enable_memory_profiler="yes"),
])
def test_refused_options(tiny_folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(options))}="):
        LLM(str(tiny_folder), **TINY_OPTIONS, **options)
