"""H14 and H15: prompts that are wholly cached, and requests that are preempted often. (H16 is the server's, H17 in
test_limits, H18 in tests/engine/test_compilations.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, RequestOutputKind, SamplingParams
from tests.conftest import TINY_OPTIONS

OPTIONS: dict[str, Any] = TINY_OPTIONS | dict(skip_tokenizer_init=True)
FEW = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
MANY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def test_h14_a_wholly_cached_prompt(tiny_folder: Path) -> None:
    """Block size 4: a prompt of 8 tokens twice, and one of 12 that begins with it, while another request that shares
    the prompt still runs."""
    prompt = [3, 4, 5, 6, 7, 8, 9, 10]
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        scheduler = llm._engine.scheduler
        free = scheduler.pool.num_free
        first, = llm.generate([prompt], FEW, use_tqdm=False)
        second, = llm.generate([prompt], FEW, use_tqdm=False)
        longer = llm.generate([prompt, [*prompt, 11, 12, 13, 14]], FEW, use_tqdm=False)[1]
        scheduler.check_integrity()
        assert scheduler.pool.num_free == free
    assert (first.num_cached_tokens, second.num_cached_tokens, longer.num_cached_tokens) == (0, 4, 8)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.outputs[0].cumulative_logprob == pytest.approx(first.outputs[0].cumulative_logprob, abs=1e-4)
    with LLM(str(tiny_folder), **OPTIONS, enable_prefix_caching=False) as llm:
        alone, = llm.generate([[*prompt, 11, 12, 13, 14]], FEW, use_tqdm=False)
    assert longer.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("options", [{}, dict(swap_space=0.001, preemption_mode="swap")])
@pytest.mark.parametrize("caching", [True, False])
def test_h15_frequent_preemption_loses_and_doubles_nothing(tiny_folder: Path, caching: bool,
                                                           options: dict[str, Any]) -> None:
    """Eight greedy requests of 20 tokens, 30 new, blocks of 4: a large pool against one that holds hardly two of them,
    with steps shorter than a prompt; streamed."""
    prompts = [[3 + i, *range(40, 59)] for i in range(8)]
    with LLM(str(tiny_folder), **(OPTIONS | dict(num_gpu_blocks_override=300))) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, MANY, use_tqdm=False)]
    cramped = OPTIONS | dict(num_gpu_blocks_override=27, max_num_batched_tokens=8, enable_prefix_caching=caching)
    with LLM(str(tiny_folder), **(cramped | options)) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        for i, prompt in enumerate(prompts):
            llm._engine.add(*llm._serving.inputs.make(str(i), prompt, params))
        streamed: dict[str, list[int]] = {str(i): [] for i in range(8)}
        while llm._engine.has_unfinished:
            for output in llm._engine.step():
                streamed[output.request_id] += output.outputs[0].token_ids
            llm._engine.scheduler.check_integrity()
        assert llm._engine.scheduler.num_preemptions > 0
        assert not options or llm.memory_report().num_swapped > 0
        assert llm._engine.scheduler.pool.num_used == 0
    assert list(streamed.values()) == expected
