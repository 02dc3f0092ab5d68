"""Embeddings against transformers' hidden states."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxserve import LLM, AsyncLLM, SamplingParams
from jaxserve.errors import EngineDeadError, InvalidInputError, PromptTooLongError
from tests.conftest import TINY_OPTIONS
from tests.engine.compilations import count_compilations

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(3, 300, length).tolist() for length in (3, 17, 1, 32, 2, 5, 1, 1, 4, 30, 31, 16)]
ENDLESS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def expected(reference: Any, prompt: list[int], pooling: str) -> np.ndarray:
    with torch.no_grad():
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].numpy()
    vector: np.ndarray = states[-1] if pooling == "last" else states.mean(0)
    return vector


async def final(llm: AsyncLLM, text: str) -> Any:
    return [output async for output in llm.generate(text, ENDLESS)][-1].outputs[0].token_ids


@contextlib.contextmanager
def held_compiler(llm: AsyncLLM) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(one that tells when the compiler has begun, one that lets it go on)."""
    begun, release = threading.Event(), threading.Event()
    embedder = llm._engine.embedder
    lower = embedder._lower

    def slow(num_rows: int) -> Any:
        begun.set()
        assert release.wait(60)
        return lower(num_rows)

    embedder._lower = slow  # type: ignore[method-assign]
    try:
        yield begun, release
    finally:
        release.set()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_as_transformers(tiny_llm: LLM, tiny_reference: Any, pooling: Any) -> None:
    found = tiny_llm.embed(PROMPTS, pooling=pooling, normalize=False)
    unit = tiny_llm.embed(PROMPTS, pooling=pooling)
    for prompt, vector, of_length_1 in zip(PROMPTS, found, unit, strict=True):
        right = expected(tiny_reference, prompt, pooling)
        assert vector.dtype == of_length_1.dtype == np.float32
        np.testing.assert_allclose(vector, right, atol=1e-4)
        np.testing.assert_allclose(of_length_1, right / np.linalg.norm(right), atol=1e-4)


def test_kinds_of_prompts(tiny_llm: LLM) -> None:
    token_ids = tiny_llm.get_tokenizer().encode("fox")
    for prompt in ("fox", ["fox"], token_ids, np.array(token_ids), {"prompt": "fox"}):
        [vector] = tiny_llm.embed(prompt)
        np.testing.assert_allclose(vector, tiny_llm.embed([token_ids])[0], atol=1e-6)
    assert tiny_llm.embed([]) == []


def test_a_size_is_compiled_once_for_both_poolings(tiny_llm: LLM) -> None:
    tiny_llm.embed([[5] * 17, [6] * 3])
    with count_compilations() as counts:
        tiny_llm.embed([[7] * 30, [8]], pooling="mean")
        tiny_llm.embed([[7] * 32], normalize=False)
    assert not counts


def test_what_is_wrong_is_said(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="pooling='first'"):
        tiny_llm.embed([5], pooling="first")  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]='33 tokens'.*at most 32.*max_num_batched_tokens"):
        tiny_llm.embed([[5], [6] * 33])
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]=\[\].*at least one token"):
        tiny_llm.embed([[5], []])
    with pytest.raises(InvalidInputError, match=r"^prompt=350"):
        tiny_llm.embed([350])


def test_new_weights_count(tiny_folder: Path, tiny_reference: Any) -> None:
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        before = llm.embed([PROMPTS[1]])[0]
        weights = dict(llm._engine.runner.params())
        weights["norm.weight"] = -weights["norm.weight"]
        llm.update_weights(weights)
        np.testing.assert_allclose(llm.embed([PROMPTS[1]])[0], -before, atol=1e-6)
    with pytest.raises(EngineDeadError):
        llm.embed([PROMPTS[1]])


def test_beside_generation(tiny_folder: Path, tiny_llm: LLM, tiny_reference: Any) -> None:
    """Tokens are the same and go on while a program is compiled; callers get their own vectors."""
    texts = ["The quick brown", "def f(x):\n", "fox"]
    right = [output.outputs[0].token_ids for output in tiny_llm.generate(texts, ENDLESS, use_tqdm=False)]

    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS)
        stats = llm._engine.stats
        with held_compiler(llm) as (begun, release):
            tasks = [asyncio.create_task(llm.embed(PROMPTS[start::3], normalize=False)) for start in range(3)]
            given_up = asyncio.create_task(llm.embed(PROMPTS))
            assert await asyncio.to_thread(begun.wait, 60)
            assert [await final(llm, text) for text in texts] == right, "while nothing is compiled"
            assert not any(task.done() for task in tasks)
            given_up.cancel()
            before, again = stats.num_prompt_tokens, asyncio.create_task(final(llm, texts[0]))
            release.set()
            for start, task in enumerate(tasks):
                for prompt, vector in zip(PROMPTS[start::3], await task, strict=True):
                    np.testing.assert_allclose(vector, expected(tiny_reference, prompt, "last"), atol=1e-4)
            assert await again == right[0]
        num_tokens = sum(map(len, PROMPTS)) + len(tiny_llm.get_tokenizer().encode(texts[0]))
        assert stats.num_prompt_tokens == before + num_tokens, "of none that was given up"
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.embed(PROMPTS)

    asyncio.run(main())


@pytest.mark.parametrize("end", ["shutdown", "failure"])
def test_the_end_is_told_at_once(tiny_folder: Path, end: str) -> None:
    """Even while the compiler holds the one who waits, and others wait for their turn; sizes that are compiled do not
    wait for it, and see new weights."""
    async def main() -> None:
        others = set(threading.enumerate())
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS)
        [before] = await llm.embed([[5, 6]])
        with held_compiler(llm) as (begun, _):
            tasks = [asyncio.create_task(llm.embed([[7] * 20, [8]])) for _ in range(3)]
            assert await asyncio.to_thread(begun.wait, 60)
            weights = dict(llm._engine.runner.params())
            await llm.update_weights(weights | {"norm.weight": -weights["norm.weight"]})
            [after] = await llm.embed([[5, 6]])
            np.testing.assert_allclose(after, -before, atol=1e-6)
            if end == "shutdown":
                ending = threading.Thread(target=llm.shutdown)
                ending.start()
            else:
                llm._engine.step = None  # type: ignore[method-assign, assignment]
                with pytest.raises(EngineDeadError):
                    await final(llm, "fox")
            told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
            assert [type(each) for each in told] == [EngineDeadError] * 3, told
        if end == "shutdown":
            ending.join(60)
        llm.shutdown()
        assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("jaxserve")]

    asyncio.run(main())


def test_shutdown_with_a_batch_before_the_engine(tiny_folder: Path) -> None:
    """A turn that waits for an engine's thread which is at something else, and then ends instead."""
    async def main() -> None:
        llm = AsyncLLM(str(tiny_folder), **TINY_OPTIONS)
        await llm.embed([[5]])
        busy, release = threading.Event(), threading.Event()

        def hold() -> None:
            busy.set()
            assert release.wait(60)

        llm._submit(hold)
        assert await asyncio.to_thread(busy.wait, 60)
        tasks = [asyncio.create_task(llm.embed([[5]])) for _ in range(4)]
        while not llm._commands:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        tasks[2].cancel()
        ending = threading.Thread(target=llm.shutdown)
        ending.start()
        release.set()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        await asyncio.to_thread(ending.join, 60)
        assert not ending.is_alive()
        assert all(isinstance(found[index], asyncio.CancelledError) for index in (0, 2))
        assert all(isinstance(found[index], EngineDeadError | list) for index in (1, 3))

    asyncio.run(main())


SPLIT = """
import json, sys
from jaxserve import LLM
from tests.conftest import TINY_OPTIONS
with LLM(sys.argv[1], tensor_parallel_size=2, **TINY_OPTIONS) as llm:
    print(json.dumps([vector.tolist() for vector in llm.embed(json.loads(sys.argv[2]), pooling="mean")]))
"""


def test_on_two_devices(tiny_folder: Path, tiny_llm: LLM) -> None:
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SPLIT, str(tiny_folder), json.dumps(PROMPTS)], env=env, text=True,
                          capture_output=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    np.testing.assert_allclose(json.loads(done.stdout), tiny_llm.embed(PROMPTS, pooling="mean"), atol=1e-4)
