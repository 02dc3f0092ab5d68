"""What is refused, and what ends before it is answered."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from jaxserve import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from jaxserve.errors import InvalidInputError, QueueFullError, RequestTimeoutError
from tests.conftest import TINY_OPTIONS

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


async def read(llm: AsyncLLM, params: SamplingParams, **options) -> int:
    """Tokens received."""
    count = 0
    async for output in llm.generate([5, 6, 7], params, **options):
        count += len(output.outputs[0].token_ids) if params is LONG else 0
    return count


def test_a_full_queue_refuses_and_others_go_on(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=1)), max_waiting_requests=2)
        results = await asyncio.gather(*(read(llm, LONG) for _ in range(8)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, QueueFullError)]
        assert refused and "max_waiting_requests is 2" in str(refused[0])
        assert [result for result in results if not isinstance(result, QueueFullError)] == [100] * (8 - len(refused))
        assert 3 <= 8 - len(refused) <= 4
        assert await read(llm, LONG) == 100
        scheduler = llm._engine.scheduler
        assert not scheduler.has_requests and scheduler.pool.num_used == 0
        llm.shutdown()

    asyncio.run(main())


def test_deadlines_end_running_and_waiting_requests(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=1)))
        await llm.warmup()
        step = llm._engine.step

        def slow_step():
            time.sleep(0.02)
            return step()

        llm._engine.step = slow_step  # type: ignore[method-assign]
        running = asyncio.create_task(read(llm, LONG, deadline_s=0.5))
        await asyncio.sleep(0.1)
        waiting = asyncio.create_task(read(llm, LONG, deadline_s=0.2))
        with pytest.raises(RequestTimeoutError, match=r"deadline_s=0\.2 passed"):
            await waiting
        with pytest.raises(RequestTimeoutError, match=r"deadline_s=0\.5 passed"):
            await running
        assert llm._engine.stats.num_timed_out == 2
        llm._engine.step = step  # type: ignore[method-assign]
        assert await read(llm, LONG, deadline_s=60) == 100
        llm._engine.scheduler.check_integrity()
        llm.shutdown()

    asyncio.run(main())


def test_the_queue_has_its_own_timeout(tiny_folder: Path) -> None:
    """The one that runs may go on."""
    with LLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=1)), queue_timeout_s=0.3) as llm:
        llm.warmup()
        step = llm._engine.step

        def slow_step():
            time.sleep(0.02)
            return step()

        llm._engine.step = slow_step  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        first, second = llm.generate([[5, 6], [7, 8]], params, use_tqdm=False)
        assert first.error is None and len(first.outputs[0].token_ids) == 40
        assert isinstance(second.error, RequestTimeoutError) and "queue_timeout_s=0.3" in str(second.error)
        assert second.finished and second.outputs[0].finish_reason == "abort"


def test_offline_callers_are_not_refused(tiny_folder: Path) -> None:
    """They wait for all of their own requests anyway."""
    with LLM(str(tiny_folder), **TINY_OPTIONS, max_waiting_requests=2) as llm:
        outputs = llm.generate([[5]] * 12, SHORT, use_tqdm=False)
        assert all(output.error is None for output in outputs)


def test_free_places_are_no_queue(tiny_folder: Path) -> None:
    """Four may run and two wait; what could never fit is another error."""
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS, max_waiting_requests=2)
        results = await asyncio.gather(*(read(llm, LONG) for _ in range(6)))
        assert results == [100] * 6
        many = SamplingParams(n=6, temperature=1.0, max_tokens=2)
        assert await read(llm, many) == 0
        with pytest.raises(InvalidInputError, match=r"n=7.*max_num_seqs"):
            await read(llm, SamplingParams(n=7, temperature=1.0, max_tokens=2))
        llm.shutdown()

    asyncio.run(main())


def test_priorities_over_the_engine(tiny_folder: Path) -> None:
    """The urgent one is answered first though it came last, and nobody's tokens change."""
    prompts, params = [[5, 6], [7, 8], [9, 10], [11, 12]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=1))) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    with LLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=1)), scheduling_policy="priority") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=[3, 2, 1, 0])
    assert [output.outputs[0].token_ids for output in outputs] == expected
    times = [output.metrics.first_token_time_s or 0 for output in outputs]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("options", "message"), [
    (dict(scheduling_policy="lifo"), "scheduling_policy='lifo'.*fcfs, priority"),
    (dict(priority_weights=3), "priority_weights=3.*PriorityWeights"),
    (dict(max_waiting_requests=0), "max_waiting_requests=0"),
    (dict(queue_timeout_s=0), "queue_timeout_s=0"),
])
def test_bad_options(options, message, tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LLM(str(tiny_folder), **options)


def test_bad_deadlines(tiny_folder: Path) -> None:
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS)
        for options in (dict(deadline_s=-1), dict(business_value=float("nan")), dict(priority="x"),
                        dict(priority=10**400), dict(deadline_s=10**400)):
            with pytest.raises(InvalidInputError, match=next(iter(options))):
                await read(llm, SHORT, **options)
        llm.shutdown()

    asyncio.run(main())


def test_ended_requests_do_not_wait_for_their_deadlines(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **TINY_OPTIONS, queue_timeout_s=1000.0) as llm:
        llm.generate([[5]] * 400, SHORT, use_tqdm=False)
        llm.generate([[5]] * 400, SHORT, use_tqdm=False)
        assert len(llm._engine._deadlines._heap) < 600
