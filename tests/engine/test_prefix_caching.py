"""Sharing beginnings saves work and memory, and changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidInputError
from tests.conftest import TINY_OPTIONS

RNG = np.random.default_rng(5)
PREFIXES = [RNG.integers(3, 90, length).tolist() for length in (17, 24, 40)]
PROMPTS = [PREFIXES[i % 3] + RNG.integers(3, 90, 1 + i % 7).tolist() for i in range(64)]
PARAMS = [SamplingParams(temperature=0 if i % 2 else 0.9, seed=i, max_tokens=12, ignore_eos=True, logprobs=1)
          for i in range(64)]


def serve(folder: Path, **options: Any) -> tuple[list[list[int]], np.ndarray, LLM]:
    with LLM(str(folder), skip_tokenizer_init=True, **(TINY_OPTIONS | options)) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        llm._engine.scheduler.check_integrity()
        assert llm._engine.scheduler.pool.num_used == 0
    logprobs = [entry[token].logprob for output in outputs
                for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)]
    return [output.token_ids for output in outputs], np.array(logprobs), llm


@pytest.fixture(scope="module")
def roomy(tiny_folder: Path) -> tuple[list[list[int]], np.ndarray]:
    """A large pool, whole prompts, nothing shared."""
    tokens, logprobs, llm = serve(tiny_folder, num_gpu_blocks_override=600, enable_prefix_caching=False)
    assert llm._engine.scheduler.num_preemptions == 0
    return tokens, logprobs


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_pool_with_sharing_gives_the_same(tiny_folder: Path, roomy, overlap: bool) -> None:
    """32 blocks of 4 tokens for four sequences of up to 59: preempted, evicted, found again; chunks of 16."""
    tokens, logprobs, llm = serve(tiny_folder, num_gpu_blocks_override=33, max_num_batched_tokens=16,
                                  async_scheduling=overlap)
    scheduler = llm._engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.pool.num_evictions > 0 and scheduler.prefixes.stats.hits > 500
    assert tokens == roomy[0]
    np.testing.assert_allclose(logprobs, roomy[1], atol=1e-4)


def test_completions_of_one_prompt_share_it(tiny_folder: Path) -> None:
    params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=4, ignore_eos=True)
    found = {}
    for caching in (True, False):
        with LLM(str(tiny_folder), **TINY_OPTIONS, enable_prefix_caching=caching) as llm:
            peak = 0
            schedule = llm._engine.scheduler.schedule

            def watched(llm=llm, schedule=schedule) -> Any:
                nonlocal peak
                plan = schedule()
                peak = max(peak, llm._engine.scheduler.pool.num_used)
                return plan

            llm._engine.scheduler.schedule = watched  # type: ignore[method-assign]
            output, = llm.generate([list(range(3, 30))], params, use_tqdm=False)
        found[caching] = [completion.token_ids for completion in output.outputs], peak
    assert found[True][0] == found[False][0]
    assert found[True][1] <= 6 + 4 * 2  # 27 tokens are 6 full blocks; then each has its own
    assert found[False][1] > 4 * 7  # each has its own from the start


def test_the_caller_learns_what_was_cached(tiny_folder: Path) -> None:
    once = SamplingParams(max_tokens=1)
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        prompt = list(range(3, 20))
        counts = [llm.generate([asked], once, use_tqdm=False)[0].num_cached_tokens for asked in (
            prompt, prompt, {"prompt_token_ids": prompt, "cache_salt": "mine"},
            {"prompt_token_ids": prompt, "cache_salt": "mine"})]
        assert counts == [0, 16, 0, 16]
        for salt in (3, "", "\ud800"):
            with pytest.raises(InvalidInputError, match="cache_salt="):
                llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, once)
        assert llm.generate([prompt], once, use_tqdm=False)[0].num_cached_tokens == 16


def test_new_weights_drop_what_the_old_ones_computed(tiny_folder: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompt = [list(range(3, 40))]
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        llm.generate(prompt, greedy, use_tqdm=False)
        other = {path: np.asarray(array)[..., ::-1].copy() for path, array in llm._engine.runner.params().items()}
        llm.update_weights(other)
        after, = llm.generate(prompt, greedy, use_tqdm=False)
        assert after.num_cached_tokens == 0
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        llm.update_weights(other)
        fresh, = llm.generate(prompt, greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == fresh.outputs[0].token_ids
