"""Guessing tokens changes none of them, and fewer steps are taken where guesses hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidInputError
from tests.conftest import TINY_OPTIONS

OPTIONS: dict[str, Any] = TINY_OPTIONS | dict(max_num_seqs=8)  # rows to spare
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
RNG = np.random.default_rng(5)
PROMPTS = [(RNG.integers(3, 90, 5).tolist() * 4)[: 9 + i] for i in range(6)]
PARAMS = [SamplingParams(temperature=0 if i % 2 else 0.8, top_k=5 * (i % 3), seed=i, max_tokens=20 + i, ignore_eos=True,
                         logprobs=1, repetition_penalty=1.2 if i == 4 else 1.0) for i in range(6)]


def serve(folder: Path, **options: Any) -> tuple[list[Any], np.ndarray, LLM]:
    """Checks the scheduler after every step."""
    with LLM(str(folder), skip_tokenizer_init=True, **(OPTIONS | options)) as llm:
        engine, step = llm._engine, llm._engine.step

        def checked() -> Any:
            outputs = step()
            engine.scheduler.check_integrity()
            return outputs

        engine.step = checked  # type: ignore[method-assign]
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        assert engine.scheduler.pool.num_used == 0
    logprobs = [entry[token].logprob for output in outputs
                for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)]
    return [output.token_ids for output in outputs], np.array(logprobs), llm


@pytest.mark.parametrize("options", [
    {}, {"async_scheduling": False}, {"num_gpu_blocks_override": 20},
    {"num_gpu_blocks_override": 20, "swap_space": 0.001, "preemption_mode": "swap", "enable_prefix_caching": False},
], ids=["overlap", "in-turn", "preempted", "swapped"])
def test_tokens_and_logprobs_are_the_same(tiny_folder: Path, options: dict[str, Any]) -> None:
    expected, expected_logprobs, plain = serve(tiny_folder)
    token_ids, logprobs, llm = serve(tiny_folder, speculative_config=NGRAM, **options)
    assert token_ids == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)
    stats = llm._engine.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens  # some hold, some do not
    assert plain._engine.stats.num_draft_tokens == 0
    if "num_gpu_blocks_override" in options:
        assert llm._engine.scheduler.num_preemptions


def test_what_repeats_takes_fewer_steps(tiny_folder: Path) -> None:
    """Without weights all logits are 0, and greedy is token 0 for ever."""
    def steps(**options: Any) -> int:
        with LLM(str(tiny_folder), skip_tokenizer_init=True, **(OPTIONS | options)) as llm:
            llm.update_weights({path: np.zeros(array.shape, array.dtype)
                                for path, array in llm._engine.runner.params().items()})
            params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
            output = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]
            assert output.token_ids == [0] * 41
            return llm._engine.stats.num_steps

    assert steps() == 41
    assert steps(speculative_config=NGRAM) <= 14  # the prompt, a few to repeat, and four tokens a step


def test_guesses_end_where_the_sequence_does(tiny_folder: Path) -> None:
    """By length, and by a token that ends it, in the middle of accepted guesses."""
    def answer(params: SamplingParams, **options: Any) -> Any:
        with LLM(str(tiny_folder), skip_tokenizer_init=True, **(OPTIONS | options)) as llm:
            return llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0]

    long = answer(SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)).token_ids
    for stop in (long[30], long[41]):
        params = SamplingParams(temperature=0, max_tokens=48, stop_token_ids=[stop], ignore_eos=True)
        plain, guessed = answer(params), answer(params, speculative_config=NGRAM)
        assert (guessed.token_ids, guessed.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert answer(SamplingParams(temperature=0, max_tokens=33, ignore_eos=True),
                  speculative_config=NGRAM).token_ids == long[:33]


def test_a_wrong_config_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"speculative_config\.method='eagle'"):
        LLM(str(tiny_folder), speculative_config={"method": "eagle"})
