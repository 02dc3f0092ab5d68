"""Bar 2: preemption, eviction, sharing and swapping change no token.

Log-probabilities agree to 1e-4, not to the bit: a request that goes on after a preemption, or from a shared beginning,
is computed in chunks of other lengths than in the large pool, and XLA sums in another order for each of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.scheduling.report import MemoryReport
from tests.conftest import TINY_OPTIONS

RNG = np.random.default_rng(11)
PREFIXES = [RNG.integers(3, 90, length).tolist() for length in (21, 30, 43)]
PROMPTS = [PREFIXES[i % 3] + RNG.integers(3, 90, 1 + i % 7).tolist() for i in range(64)]
PARAMS = [SamplingParams(temperature=0 if i % 2 else 0.9, seed=i, max_tokens=14, ignore_eos=True, logprobs=1)
          for i in range(64)]
TINY_POOL: dict[str, Any] = dict(num_gpu_blocks_override=37, max_num_batched_tokens=16)
"""36 blocks of 4 tokens for four sequences of up to 63, and steps shorter than most prompts."""

Answers = tuple[list[Sequence[int]], np.ndarray]


def serve(folder: Path, **options: Any) -> tuple[Answers, MemoryReport]:
    with LLM(str(folder), skip_tokenizer_init=True, enable_memory_profiler=True,
             **(TINY_OPTIONS | options)) as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        llm._engine.scheduler.check_integrity()
        report = llm.memory_report()
    assert report.num_used == report.num_host_used == 0 and not report.unexplained
    logprobs = [entry[token].logprob for output in outputs
                for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)]
    return ([output.token_ids for output in outputs], np.array(logprobs)), report


@pytest.fixture(scope="module")
def roomy(tiny_folder: Path) -> Answers:
    """A large pool, whole prompts, nothing shared."""
    answers, report = serve(tiny_folder, num_gpu_blocks_override=600, max_num_batched_tokens=64,
                            enable_prefix_caching=False)
    assert report.num_preemptions == report.num_evictions == 0
    return answers


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("options", [
    pytest.param({}, id="recompute"),
    pytest.param({"swap_space": 0.001, "preemption_mode": "swap"}, id="swap"),
    pytest.param({"swap_space": 3e-5, "preemption_mode": "swap"}, id="swap-full"),
    pytest.param({"swap_space": 0.001, "preemption_mode": "swap", "swap_compression": True}, id="compressed"),
    pytest.param({"swap_space": 0.001, "preemption_mode": "recompute"}, id="prefixes-only"),
    pytest.param({"async_scheduling": False, "swap_space": 0.001, "preemption_mode": "swap"}, id="swap-in-turn"),
])
def test_a_tiny_pool_gives_the_same(tiny_folder: Path, roomy: Answers, caching: bool, options: dict[str, Any]) -> None:
    (tokens, logprobs), report = serve(tiny_folder, enable_prefix_caching=caching, **TINY_POOL, **options)
    print({name: value for name, value in vars(report).items() if isinstance(value, int | float) and value})
    assert report.num_preemptions > 0
    assert bool(report.num_evictions) is bool(report.prefix_hits) is caching
    if options.get("preemption_mode") == "swap":
        assert report.num_swapped > 0 and report.num_blocks_back > 0
    assert tokens == roomy[0]
    np.testing.assert_allclose(logprobs, roomy[1], atol=1e-4)
