"""Bar 5: the same tokens whether steps overlap or not, alone or among 16, in whatever order requests come."""

import asyncio
import random

import pytest

from jaxserve import LLM, AsyncLLM, SamplingParams
from tests.engine.conftest import WIDE_OPTIONS

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 350) for _ in range(length)]
           for length in [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 100, 150, 7, 7, 200, 50, 4, 90, 12, 5]]
PARAMS = [SamplingParams(temperature=0.9 if i % 2 else 0.0, seed=i if i % 2 else None, max_tokens=10 + i,
                         ignore_eos=True, repetition_penalty=1.2 if i % 5 == 0 else 1.0,
                         top_p=0.9 if i % 7 == 0 else 1.0,
                         min_tokens=3 if i % 3 == 0 else 0) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(wide_llm) -> list[list[int]]:
    """Each request alone in the engine."""
    return [wide_llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def check(llm: LLM, expected: list[list[int]], order: list[int]) -> None:
    outputs = llm.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [expected[i] for i in order]


def test_together_equals_alone_in_any_order(wide_llm, expected):
    order = list(range(len(PROMPTS)))
    check(wide_llm, expected, order)
    check(wide_llm, expected, order[::-1])
    for seed in range(3):
        random.Random(seed).shuffle(order)
        check(wide_llm, expected, order)


def test_without_overlap_too(make_wide_llm, expected):
    with make_wide_llm(async_scheduling=False) as llm:
        check(llm, expected, list(range(len(PROMPTS))))
        check(llm, expected, list(range(len(PROMPTS)))[::-1])
        for i in (0, 3, 11):
            check(llm, expected, [i])


def test_requests_that_join_in_the_middle(wide_llm, expected):
    engine, inputs = wide_llm._engine, wide_llm._serving.inputs
    for gap in (0, 1, 3):
        found = {}
        for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add(*inputs.make(f"{gap}-{i}", prompt, params))
            for _ in range(gap):
                found.update({output.request_id: output for output in engine.step()})
            engine.scheduler.check_integrity()
        while engine.has_unfinished:
            found.update({output.request_id: output for output in engine.step()})
        assert [found[f"{gap}-{i}"].outputs[0].token_ids for i in range(len(PROMPTS))] == expected


@pytest.mark.parametrize("overlap", [True, False])
def test_asynchronous_arrivals(tiny_folder, expected, overlap):
    async def main() -> list[list[int]]:
        llm = AsyncLLM(str(tiny_folder), **WIDE_OPTIONS, async_scheduling=overlap)
        rng = random.Random(overlap)

        async def one(i: int) -> list[int]:
            await asyncio.sleep(rng.random() * 0.2)
            return [output async for output in llm.generate(PROMPTS[i], PARAMS[i])][-1].outputs[0].token_ids

        try:
            return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))
        finally:
            llm.shutdown()

    assert asyncio.run(main()) == expected
