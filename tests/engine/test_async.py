"""AsyncLLM: streams, aborts, failures."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.errors import EngineDeadError, InvalidInputError
from jaxserve.request import RequestOutputKind
from tests.conftest import TINY_OPTIONS

TEXTS = ["The quick brown", "def f(x):\n", "日本語 and 😀", "a", "Numbers 0 1 2 3 4 5 " * 3, "fox " * 20]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture
def make_llm(tiny_folder):
    """Makes engines and shuts them down."""
    made = []

    def make(**options) -> AsyncLLM:
        made.append(AsyncLLM(str(tiny_folder), **(TINY_OPTIONS | options)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
        assert not llm._thread.is_alive() and not llm.is_running


async def collect(llm: AsyncLLM, prompt, params: SamplingParams, **options) -> list:
    return [output async for output in llm.generate(prompt, params, **options)]


async def settle(llm: AsyncLLM) -> None:
    """Waits until the engine's thread has nothing left to do; then nothing may be held."""
    for _ in range(500):
        await asyncio.sleep(0.01)
        if not llm._engine.has_unfinished and not llm._commands:
            break
    scheduler = llm._engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_requests and scheduler.pool.num_used == 0 and not llm._engine.has_unfinished


def test_many_at_once_in_every_form_equal_the_blocking_face(make_llm, tiny_llm):
    variants = [PARAMS, replace(PARAMS, temperature=0.8, seed=3), replace(PARAMS, stop=["e", "zz"]),
                replace(PARAMS, logprobs=2, prompt_logprobs=1), replace(PARAMS, ignore_eos=False)]
    wanted = [(text, params) for params in variants for text in TEXTS]
    expected = tiny_llm.generate([text for text, _ in wanted], [params for _, params in wanted], use_tqdm=False)

    async def main():
        llm = make_llm()
        kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]
        found = await asyncio.gather(*(collect(llm, text, replace(params, output_kind=kind))
                                       for kind in kinds for text, params in wanted))
        await settle(llm)
        return [found[i * len(wanted) : (i + 1) * len(wanted)] for i in range(3)]

    deltas, cumulative, final = asyncio.run(main())
    for (text, _), blocking, parts, growing, only in zip(wanted, expected, deltas, cumulative, final, strict=True):
        right = blocking.outputs[0]
        assert [output.finished for output in parts] == [False] * (len(parts) - 1) + [True]
        pieces = [output.outputs[0] for output in parts]
        assert "".join(piece.text for piece in pieces) == right.text
        assert [token_id for piece in pieces for token_id in piece.token_ids] == right.token_ids
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (right.finish_reason, right.stop_reason)
        assert len(only) == 1 and growing[-1].finished and not any(output.finished for output in growing[:-1])
        for last in (growing[-1], only[0]):
            assert last.prompt == text and last.outputs[0].text == right.text
            assert last.outputs[0].token_ids == right.token_ids
            assert last.prompt_token_ids == blocking.prompt_token_ids
        if right.logprobs is not None:
            joined = [position for piece in pieces for position in piece.logprobs]
            for found in (joined, growing[-1].outputs[0].logprobs, only[0].outputs[0].logprobs):
                assert [list(position) for position in found] == [list(position) for position in right.logprobs]
            assert len(only[0].prompt_logprobs) == len(blocking.prompt_logprobs) == len(parts[0].prompt_logprobs)


def test_n_completions_stream_side_by_side(make_llm, tiny_llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    blocking, = tiny_llm.generate("The", params, use_tqdm=False)

    async def main():
        llm = make_llm()
        in_deltas = replace(params, output_kind=RequestOutputKind.DELTA)
        return await collect(llm, "The", in_deltas), await collect(llm, "The", params)

    deltas, cumulative = asyncio.run(main())
    for index, right in enumerate(blocking.outputs):
        pieces = [c for output in deltas for c in output.outputs if c.index == index]
        assert [token_id for piece in pieces for token_id in piece.token_ids] == right.token_ids
        assert "".join(piece.text for piece in pieces) == right.text
        last = [c for output in cumulative for c in output.outputs if c.index == index][-1]
        assert last.token_ids == right.token_ids and last.text == right.text
    assert [output.finished for output in deltas].count(True) == 1 and deltas[-1].finished


def test_abort_ends_the_iterator_and_frees_the_blocks(make_llm):
    async def main():
        llm = make_llm()
        outputs: dict[str, list] = {"cumulative": [], "delta": []}

        async def read(name: str, kind: RequestOutputKind):
            async for output in llm.generate("The", replace(ENDLESS, output_kind=kind), request_id=name):
                outputs[name].append(output)
                if len(outputs[name]) == 5:
                    await llm.abort(name)

        other = asyncio.create_task(collect(llm, "fox", PARAMS))
        await asyncio.gather(read("cumulative", RequestOutputKind.CUMULATIVE), read("delta", RequestOutputKind.DELTA))
        await llm.abort("delta")  # again, and one that never was
        await llm.abort("unknown")
        final_only = asyncio.create_task(collect(llm, "a", replace(ENDLESS, output_kind=RequestOutputKind.FINAL_ONLY),
                                                 request_id="final"))
        while llm._engine.stats.num_generated_tokens < 40:
            await asyncio.sleep(0.002)
        await llm.abort("final")
        await settle(llm)
        return outputs, await other, await final_only, llm.get_tokenizer()

    outputs, other, (final,), tokenizer = asyncio.run(main())
    for found in (*outputs.values(), [final]):
        assert found[-1].finished and found[-1].outputs[0].finish_reason == "abort"
        assert not any(output.finished for output in found[:-1])
    assert other[-1].outputs[0].finish_reason == "length"
    for completion in (outputs["cumulative"][-1].outputs[0], final.outputs[0]):
        assert completion.token_ids and completion.text == tokenizer.decode(completion.token_ids)
    pieces = [output.outputs[0] for output in outputs["delta"]]
    joined = tokenizer.decode([token_id for piece in pieces for token_id in piece.token_ids])
    assert "".join(piece.text for piece in pieces) == joined


def test_leaving_early_or_being_cancelled_aborts(make_llm):
    async def main():
        llm = make_llm()
        stream = llm.generate("The", ENDLESS)
        async for _ in stream:
            break
        await stream.aclose()
        await settle(llm)
        task = asyncio.create_task(collect(llm, "The", ENDLESS))
        waiting = [asyncio.create_task(collect(llm, "The", ENDLESS)) for _ in range(8)]  # more than can run
        await asyncio.sleep(0.05)
        for each in (task, *waiting):
            each.cancel()
        results = await asyncio.gather(task, *waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await settle(llm)
        assert llm._engine.stats.num_aborted == 10 and not llm._mailboxes
        assert (await collect(llm, "The", PARAMS))[-1].finished

    asyncio.run(main())


def test_bad_prompts_and_used_ids_fail_alone(make_llm):
    async def main():
        llm = make_llm()
        running = asyncio.create_task(collect(llm, "The", PARAMS, request_id="mine"))
        await asyncio.sleep(0)
        for prompt in ("x" * 500, [10**6], [], 5, None, {"prompt": 5}):
            with pytest.raises(InvalidInputError, match="prompt"):
                await collect(llm, prompt, PARAMS)
        with pytest.raises(InvalidInputError, match=r"request_id.*mine"):
            await collect(llm, "fox", PARAMS, request_id="mine")
        assert (await running)[-1].outputs[0].finish_reason == "length"
        assert (await collect(llm, "fox", PARAMS, request_id="mine"))[-1].finished, "free again"
        await settle(llm)

    asyncio.run(main())


def test_a_failing_step_tells_everybody(make_llm, monkeypatch):
    async def main():
        llm = make_llm()
        tasks = [asyncio.create_task(collect(llm, text, ENDLESS)) for text in TEXTS]
        while llm._engine.stats.num_generated_tokens < 10:
            await asyncio.sleep(0.005)

        def step():
            raise RuntimeError("the device is on fire")

        monkeypatch.setattr(llm._engine, "step", step)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) and "on fire" in str(result)
            assert isinstance(result.__cause__, RuntimeError)
        assert not llm.is_running
        for later in (collect(llm, "The", PARAMS), llm.abort("x"), llm.update_weights({}), llm.warmup()):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(later, 10)
        assert not llm._mailboxes

    asyncio.run(main())


def test_shutdown_while_running_ends_all_readers(make_llm):
    async def main():
        llm = make_llm()
        tasks = [asyncio.create_task(collect(llm, text, ENDLESS)) for text in TEXTS]
        while llm._engine.stats.num_generated_tokens < 5:
            await asyncio.sleep(0.005)
        start = time.monotonic()
        await asyncio.to_thread(llm.shutdown)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(result, EngineDeadError) and "shut down" in str(result) for result in results)
        assert time.monotonic() - start < 10
        with pytest.raises(EngineDeadError):
            await collect(llm, "The", PARAMS)
        llm.shutdown()  # twice is fine

    asyncio.run(main())


def test_giving_up_on_a_command_does_not_kill_the_engine(make_llm):
    """A caller may be cancelled while it waits for the engine's thread."""
    async def main():
        llm = make_llm()
        running = asyncio.create_task(collect(llm, "The", PARAMS))
        release = threading.Event()
        blocked = llm._submit(release.wait)
        commands = llm.abort("x"), llm.update_weights({}), llm.abort("y")
        givers_up = [asyncio.create_task(command) for command in commands]
        await asyncio.sleep(0.05)
        for task in givers_up:
            task.cancel()
        await asyncio.gather(*givers_up, return_exceptions=True)
        release.set()
        await asyncio.wrap_future(blocked)
        assert (await asyncio.wait_for(running, 300))[-1].finished and llm.is_running
        await settle(llm)

    asyncio.run(main())


def test_giving_up_then_dying_still_tells_the_others(make_llm):
    async def main():
        llm = make_llm()
        running = asyncio.create_task(collect(llm, "The", ENDLESS))
        while not llm._engine.stats.num_generated_tokens:
            await asyncio.sleep(0.005)
        release = threading.Event()
        llm._submit(release.wait)
        giver_up = asyncio.create_task(llm.abort("x"))
        await asyncio.sleep(0.05)
        giver_up.cancel()
        with llm._wake:
            llm._stopping = True
        release.set()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(running, 10)

    asyncio.run(main())


def test_an_event_loop_may_end_while_requests_run(make_llm):
    """Its requests are aborted; another loop goes on with the same engine."""
    llm = make_llm()

    async def leave():
        task = asyncio.create_task(collect(llm, "The", ENDLESS))
        await asyncio.sleep(0.05)
        assert not task.done()

    async def stay():
        found = await collect(llm, "The", PARAMS)
        await settle(llm)
        return found

    asyncio.run(leave())
    assert asyncio.run(stay())[-1].finished
