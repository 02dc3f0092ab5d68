"""Requests that come together begin a few at a time, in order, and none is forgotten."""

from __future__ import annotations

import asyncio

from jaxserve.server.pacing import Turns


def test_a_crowd_begins_a_few_at_a_time() -> None:
    async def main() -> tuple[list[int], list[int]]:
        turns, order, per_iteration = Turns(3), list[int](), list[int]()

        async def begin(index: int) -> None:
            await turns.take()
            order.append(index)

        tasks = [asyncio.create_task(begin(index)) for index in range(11)]
        while not all(task.done() for task in tasks):
            before = len(order)
            await asyncio.sleep(0)
            per_iteration.append(len(order) - before)
        await begin(11)  # later, alone: at once
        return order, per_iteration

    order, per_iteration = asyncio.run(main())
    assert order == list(range(12)) and max(per_iteration) == 3 and sum(per_iteration) == 11


def test_who_leaves_takes_no_turn() -> None:
    async def main() -> list[int]:
        turns, order = Turns(1), list[int]()

        async def begin(index: int) -> None:
            await turns.take()
            order.append(index)

        tasks = [asyncio.create_task(begin(index)) for index in range(6)]
        await asyncio.sleep(0)
        for task in tasks[2:4]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await begin(6)
        return order

    assert asyncio.run(main()) == [0, 1, 4, 5, 6]
