"""H04, H05, H11: seeds, penalties and tiny temperatures, through the whole engine."""

import math
from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from jaxserve import LLM, SamplingParams
from tests.conftest import TINY_OPTIONS
from tests.tiny import reference_logprobs

PROMPT, OTHER = "The quick brown", "def f(x):\n"


def tokens(llm: LLM, prompts, params) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("seed", [42, 0, -7, 2**40 + 42, 2**63 - 1])
def test_h04_a_seed_holds_whatever_shares_the_batch(tiny_llm, seed):
    seeded = SamplingParams(temperature=0.8, seed=seed, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.3)
    alone, = tokens(tiny_llm, PROMPT, seeded)
    neighbours = []
    for _ in range(4):
        first, second = tokens(tiny_llm, [PROMPT, OTHER], [seeded, unseeded])
        assert first == alone
        neighbours.append(second)
    assert len({tuple(ids) for ids in neighbours}) > 1, "without a seed it varies"
    assert tokens(tiny_llm, [OTHER, PROMPT], [unseeded, seeded])[1] == alone
    short = SamplingParams(temperature=1.2, seed=7, max_tokens=3)
    assert tokens(tiny_llm, [PROMPT, OTHER], [seeded, short])[0] == alone
    crowd = tokens(tiny_llm, [OTHER, PROMPT, "x" * 100, PROMPT, OTHER, PROMPT],
                   [greedy, seeded, unseeded, seeded, greedy, seeded])
    assert crowd[1] == crowd[3] == crowd[5] == alone
    other_seed = SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True)
    assert tokens(tiny_llm, PROMPT, other_seed)[0] != alone


def expected_with_penalties(reference, prompt_ids: list[int], num_new: int, *, repetition: float = 1.0,
                            presence: float = 0.0, frequency: float = 0.0) -> list[int]:
    """A greedy loop with Hugging Face's repetition penalty and OpenAI's other two."""
    generated: list[int] = []
    processor = RepetitionPenaltyLogitsProcessor(repetition)
    for _ in range(num_new):
        ids = torch.tensor([prompt_ids + generated])
        with torch.no_grad():
            logits = processor(ids, reference(ids).logits[:, -1].float())[0]
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=len(logits))
        generated.append(int(torch.argmax(logits - frequency * counts - presence * (counts > 0))))
    return generated


PENALTIES = [{"repetition": 2.0}, {"presence": 1.0}, {"frequency": 1.0}, {"repetition": 0.5},
             {"repetition": 1.3, "presence": -1.5, "frequency": 2.0}, {"frequency": -2.0}]


@pytest.mark.parametrize("fixture", ["tiny_llm", "cramped_llm"])
def test_h05_penalties_count_what_they_should(request, tiny_reference, fixture):
    """With preemptions too: the counts of a request that comes back are made anew from its tokens."""
    llm = request.getfixturevalue(fixture)
    tokenizer = llm.get_tokenizer()
    prompts = ["fox fox fox the", "Numbers 0 1 2 3 3 3 3" * 2, "a", "The quick brown fox jumps over", "日本語日本語",
               "aaaaaa"]
    prompts = [prompt + " 0123456789" * 2 for prompt in prompts]
    options: list[Any] = [{f"{name}_penalty": value for name, value in penalties.items()} for penalties in PENALTIES]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **each) for each in options]
    before = llm._engine.scheduler.num_preemptions
    found = tokens(llm, prompts, params)
    for prompt, penalties, ids in zip(prompts, PENALTIES, found, strict=True):
        assert ids == expected_with_penalties(tiny_reference, tokenizer.encode(prompt), 24, **penalties), penalties
    assert (llm._engine.scheduler.num_preemptions > before) == (fixture == "cramped_llm")


def test_h05_the_first_step_already_penalises_the_prompt_and_only_for_repetition(tiny_llm, tiny_reference):
    plain = tiny_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
    best = plain.outputs[0].token_ids[0]
    ids = [*plain.prompt_token_ids]
    ids[1:1] = [best] * 3  # now the prompt has the likeliest token, perhaps no longer likeliest
    logits = reference_logprobs(tiny_reference, ids)[-1]
    for name, changes in (("repetition_penalty", True), ("presence_penalty", False), ("frequency_penalty", False)):
        option: dict[str, Any] = {name: 2.0}
        params = SamplingParams(temperature=0, max_tokens=1, **option)
        token = tokens(tiny_llm, [ids], params)[0]
        if not changes:
            assert token == [int(torch.argmax(logits))]
    # Raw log-probabilities are reported, whatever the penalties.
    params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=2.0, logprobs=0)
    output, = tiny_llm.generate([ids], params, use_tqdm=False)
    token_id = output.outputs[0].token_ids[0]
    assert output.outputs[0].logprobs[0][token_id].logprob == pytest.approx(logits[token_id].item(), abs=1e-4)


def check_tiny_temperatures(llm: LLM) -> None:
    def run(temperature: float):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]

    greedy = run(0)
    for position in greedy.logprobs:
        first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
        assert first - second > 0.02, "the test wants the likeliest to stand out"
    for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 1e-30):
        found = run(temperature)
        assert found.token_ids == greedy.token_ids
        assert all(math.isfinite(entry.logprob) for position in found.logprobs for entry in position.values())


def test_h11_tiny_temperatures_are_greedy(tiny_llm):
    check_tiny_temperatures(tiny_llm)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_h11_in_half_precision_too(tiny_folder, dtype):
    options = TINY_OPTIONS | dict(dtype=dtype, max_num_seqs=1, max_num_batched_tokens=16)  # two programs are compiled
    with LLM(str(tiny_folder), **options) as llm:
        check_tiny_temperatures(llm)
