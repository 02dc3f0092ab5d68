"""After warm-up nothing is compiled, whatever is asked (H18, and bar 4 of the engine's issue)."""

import gc
import random
from typing import Any

import jax
import psutil
import pytest

from jaxserve import LLM, SamplingParams
from tests.engine.compilations import count_compilations

MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "seed": 4}, {"temperature": 0, "logprobs": 5},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0, "prompt_logprobs": 3}, {"temperature": 0.5, "logprobs": 20, "prompt_logprobs": 20},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {5: 3.0}}, {"temperature": 1.0, "min_tokens": 3},
    {"temperature": 0, "bad_words": ["fox"]},
    {"temperature": 0, "bad_words": ["quick brown fox"]}, {"temperature": 1.0, "allowed_token_ids": [5, 6, 7, 8]},
    {"temperature": 1.0, "n": 3}, {"temperature": 0, "stop": ["o", "xyz"]},
    {"temperature": 0, "stop_token_ids": [40, 50]},
    {"temperature": 1.0, "ignore_eos": True, "detokenize": False},
]


def requests(count: int, longest: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(1, longest) for _ in range(count - 2))]
    prompts = [[rng.randrange(3, 350) for _ in range(length)] for length in lengths]
    options: list[Any] = [{"max_tokens": rng.randint(4, 12)} | MIXTURE[i % len(MIXTURE)] for i in range(count)]
    return prompts, [SamplingParams(**each) for each in options]


def run(llm: LLM, prompts, params) -> None:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.finished and output.error is None for output in outputs)


@pytest.fixture(scope="module")
def warm(wide_llm):
    """After warm-up there is one program for each bucket."""
    programs = wide_llm._engine.runner.programs
    print(f"warm-up: {programs.num_compiled} programs, {len(wide_llm._engine.runner.buckets.all())} buckets")
    assert programs.num_compiled == len(wide_llm._engine.runner.buckets.all()) == 7
    return wide_llm


def test_h18_twenty_lengths_compile_nothing(warm):
    prompts, params = requests(20, 200)
    assert len({len(prompt) for prompt in prompts}) >= 18
    with count_compilations() as counts:
        run(warm, prompts, params)
        first = dict(counts)
        run(warm, prompts, params)
    print(f"first pass: {first or 'nothing'}, second pass: {dict(counts - counts.__class__(first)) or 'nothing'}")
    assert not counts and warm._engine.runner.programs.num_compiled == 7


def test_h18_each_request_alone_compiles_nothing(warm):
    prompts, params = requests(20, 60, seed=1)
    with count_compilations() as counts:
        for prompt, own in zip(prompts, params, strict=True):
            run(warm, [prompt], own)
        run(warm, "Some text, and chat", SamplingParams(temperature=0))
        warm.chat([{"role": "user", "content": "Hi"}], use_tqdm=False)
    assert not counts


def test_bar_4_two_hundred_requests_compile_nothing(warm):
    prompts, params = requests(200, 200, seed=2)
    with count_compilations() as counts:
        run(warm, prompts, params)
    print(f"200 requests, {warm._engine.stats.num_steps} steps so far, compiled: {dict(counts) or 'nothing'}")
    assert not counts and warm._engine.runner.programs.num_compiled == 7


def test_preemption_abort_and_new_weights_compile_nothing(warm):
    with count_compilations() as counts:
        prompts, params = requests(8, 200, seed=3)
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            warm._engine.add(*warm._serving.inputs.make(f"abort-{i}", prompt, own))
        for _ in range(6):
            warm._engine.step()
        warm._engine.scheduler.recompute_all()
        for _ in range(3):
            warm._engine.step()
        for i in range(4):
            warm._engine.abort(f"abort-{i}")
        warm.update_weights(warm._engine.runner.params())
        while warm._engine.has_unfinished:
            warm._engine.step()
    assert not counts


def test_h18_logprobs_do_not_pile_up(warm):
    """Neither device arrays nor host memory remain when outputs are gone."""
    prompts, _ = requests(20, 200, seed=4)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    run(warm, prompts, params)
    gc.collect()
    arrays, memory = len(jax.live_arrays()), psutil.Process().memory_info().rss
    for _ in range(3):
        run(warm, prompts, params)
    gc.collect()
    grown = psutil.Process().memory_info().rss - memory
    print(f"grown by {grown / 2**20:.1f} MiB over 60 requests")
    assert len(jax.live_arrays()) <= arrays + 8 and grown < 32 * 2**20
