"""H08, H10, H17: prompts at the limits, ids outside the vocabulary, and a cache that is too small."""

import math
from dataclasses import replace
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.errors import InvalidInputError, PromptTooLongError
from tests.conftest import TINY_OPTIONS
from tests.faults.scripted import Vocabulary, scripted_llm
from tests.tiny import reference_greedy

LIMIT = TINY_OPTIONS["max_model_len"]

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def prompt_of(num_tokens: int) -> list[int]:
    return [3 + (7 * i) % 300 for i in range(num_tokens)]


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 1}, {"max_tokens": None}, {"logprobs": 2, "seed": 1}],
                         ids=str)
def test_h08_prompts_around_max_model_len(tiny_llm, options):
    params = SamplingParams(**({"temperature": 0, "max_tokens": 1, "ignore_eos": True} | options))
    for num_tokens in (LIMIT - 1, LIMIT):
        exact, behind = tiny_llm.generate([prompt_of(num_tokens), prompt_of(5)], [params, GREEDY], use_tqdm=False)
        assert len(exact.outputs[0].token_ids) == 1 and exact.outputs[0].finish_reason == "length"
        assert len(behind.outputs[0].token_ids) == 4
        if "prompt_logprobs" in options:
            assert len(exact.prompt_logprobs) == num_tokens
    refused, behind = tiny_llm.generate([prompt_of(LIMIT + 1), prompt_of(5)], [params, GREEDY], use_tqdm=False)
    assert isinstance(refused.error, PromptTooLongError) and not refused.outputs
    assert f"{LIMIT + 1} tokens" in str(refused.error) and f"{LIMIT} tokens" in str(refused.error)
    assert len(behind.outputs[0].token_ids) == 4
    with pytest.raises(PromptTooLongError, match=f"{LIMIT + 1} tokens.*{LIMIT} tokens"):
        tiny_llm.generate(prompt_of(LIMIT + 1), params, use_tqdm=False)


def test_h08_the_first_token_of_a_full_prompt_is_the_right_one(tiny_llm, tiny_reference):
    output, = tiny_llm.generate(prompt_of(LIMIT), GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == reference_greedy(tiny_reference, prompt_of(LIMIT), 1)


@pytest.mark.parametrize(("bias", "shown"), [
    ({355: 1.0}, "355"), ({"355": 1.0}, "355"), ({-1: 1.0}, "-1"), ({"-1": 1}, "-1"), ({"word": 1.0}, "word"),
    ({3: math.nan}, "nan"), ({3: 101}, "101"), ({3: None}, "None"), ({3.5: 1}, "3.5"), ([3, 1], "3"),
    ({True: 1}, "True")], ids=str)
def test_h10_bad_logit_bias_is_refused_by_name(tiny_llm, bias, shown):
    with pytest.raises(InvalidInputError, match="logit_bias") as caught:
        tiny_llm.generate("The", SamplingParams(logit_bias=bias), use_tqdm=False)
    assert shown in str(caught.value)
    assert len(tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 4


@pytest.mark.parametrize("token_id", [10**9, 2**31, 2**63, -1])
def test_h10_bad_prompt_ids_are_refused(tiny_llm, token_id):
    vocab_size = tiny_llm._serving.model.vocab_size
    for prompt in ([5, token_id], [token_id], {"prompt_token_ids": [token_id, 5]}, [vocab_size]):
        bad = token_id if prompt != [vocab_size] else vocab_size
        with pytest.raises(InvalidInputError, match=f"prompt.*{bad}.*from 0 to {vocab_size - 1}"):
            tiny_llm.generate(prompt, GREEDY, use_tqdm=False)
    mixed = tiny_llm.generate([[5, token_id], [5, 6]], GREEDY, use_tqdm=False)
    assert "prompts[0]" in str(mixed[0].error) and len(mixed[1].outputs[0].token_ids) == 4
    assert tiny_llm.generate([vocab_size - 1], GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_h10_other_lists_of_ids_are_checked_too(tiny_llm, name):
    for bad in ([5, 10**6], [-1], ["a"], [1.5]):
        with pytest.raises(InvalidInputError, match=name):
            options: dict[str, Any] = {name: bad}
            tiny_llm.generate("The", SamplingParams(**options), use_tqdm=False)


def test_h10_an_empty_bias_is_none_and_100_decides(tiny_llm):
    plain, = tiny_llm.generate("The", GREEDY, use_tqdm=False)
    empty, = tiny_llm.generate("The", replace(GREEDY, logit_bias={}), use_tqdm=False)
    assert empty.outputs[0].token_ids == plain.outputs[0].token_ids
    forced, = tiny_llm.generate("The", replace(GREEDY, logit_bias={77: 100}, logprobs=5), use_tqdm=False)
    assert forced.outputs[0].token_ids == [77] * 4
    assert all(math.isfinite(entry.logprob) for position in forced.outputs[0].logprobs for entry in position.values())
    assert math.isfinite(forced.outputs[0].cumulative_logprob)
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=20, allowed_token_ids=[70, 71])
    only, = tiny_llm.generate("The", params, use_tqdm=False)
    assert set(only.outputs[0].token_ids) == {70, 71}


@pytest.mark.parametrize("overlap", [False, True])
def test_h17_a_prompt_larger_than_the_pool_does_not_block_the_queue(overlap):
    """8 blocks of 4 tokens (and the null block), max_model_len 64; a byte of the prompts is a token."""
    with scripted_llm(Vocabulary([]), {}, overlap=overlap, num_blocks=9, max_model_len=64, eos_token_ids=[]) as llm:
        big, *short = llm.generate(["x" * 40, "x" * 5, "y" * 6], GREEDY, use_tqdm=False)
        assert isinstance(big.error, PromptTooLongError)
        assert "40 tokens" in str(big.error) and "32 tokens" in str(big.error)
        assert all(len(output.outputs[0].token_ids) == 4 for output in short)
        long = SamplingParams(temperature=0, max_tokens=60)
        lone, = llm.generate("x" * 5, long, use_tqdm=False)
        assert lone.outputs[0].finish_reason == "length" and len(lone.outputs[0].token_ids) == 28
        assert lone.metrics.num_preemptions == 0
        full, = llm.generate("x" * 32, GREEDY, use_tqdm=False)
        assert full.outputs[0].finish_reason == "length" and len(full.outputs[0].token_ids) == 1
        many = llm.generate(["x" * (5 + i) for i in range(6)], long, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in many] == [28 - i for i in range(6)]


def test_h17_with_a_model(cramped_llm):
    """33 blocks of 4 hold 132 tokens: one request of 128 may run, four wait for each other, all end."""
    long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    outputs = cramped_llm.generate([prompt_of(20 + 10 * i) for i in range(4)], long, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [108, 98, 88, 78]
    assert outputs[0].metrics.num_preemptions == 0 < sum(output.metrics.num_preemptions for output in outputs)
