"""Coroutines that wait for a thread: cancelled, told of the end, or served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from jaxserve.engine.lane import Lane
from jaxserve.errors import EngineDeadError


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test-lane")
    yield lane
    lane.end(lambda: EngineDeadError("over"))
    lane.join()
    assert "test-lane" not in "".join(thread.name for thread in threading.enumerate())


def test_one_after_the_other(lane: Lane) -> None:
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        if number == 2:
            raise ValueError("no")
        return number

    async def main() -> None:
        found = await asyncio.gather(*(lane.run(partial(work, n)) for n in range(5)), return_exceptions=True)
        assert [str(each) for each in found] == ["0", "1", "no", "3", "4"] and done == [0, 1, 2, 3, 4]

    asyncio.run(main())


@pytest.mark.parametrize("by", ["cancel", "end"])
def test_nobody_waits_for_a_thread_that_sleeps(lane: Lane, by: str) -> None:
    """Not who sent it to sleep, and not who is next; whose work then never begins."""
    begun, release, late = threading.Event(), threading.Event(), threading.Event()

    def sleep() -> None:
        begun.set()
        assert release.wait(60)

    async def main() -> None:
        tasks = [asyncio.create_task(lane.run(sleep)), asyncio.create_task(lane.run(late.set))]
        await asyncio.to_thread(begun.wait, 60)
        if by == "cancel":
            for task in tasks:
                task.cancel()
        else:
            lane.end(lambda: EngineDeadError("over"))
        kind = asyncio.CancelledError if by == "cancel" else EngineDeadError
        first, second = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert isinstance(first, kind) and isinstance(second, kind) and first is not second
        release.set()
        if by == "cancel":
            assert await lane.run(lambda: 5) == 5, "the thread goes on"
        else:
            with pytest.raises(EngineDeadError):
                await lane.run(lambda: 5)

    asyncio.run(main())
    lane.join()
    assert not late.is_set() and not lane._waiting
