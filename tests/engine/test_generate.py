"""LLM.generate on a tiny model against transformers."""

import pytest
import torch

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidInputError, PromptTooLongError
from tests.conftest import TINY_OPTIONS
from tests.tiny import reference_greedy, reference_logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TEXTS = ["The quick brown", "def f(x):\n", "日本語 and 😀", "a", "Numbers 0 1 2 3 4 5 " * 4, "fox " * 20]


def check_integrity(llm: LLM) -> None:
    """Nothing is left in the engine."""
    scheduler = llm._engine.scheduler
    scheduler.check_integrity()
    assert not scheduler.has_requests and scheduler.pool.num_used == 0


def test_greedy_equals_transformers(tiny_llm, tiny_reference):
    outputs = tiny_llm.generate(TEXTS, GREEDY, use_tqdm=False)
    tokenizer = tiny_llm.get_tokenizer()
    for text, output in zip(TEXTS, outputs, strict=True):
        assert output.prompt == text and output.finished
        assert output.prompt_token_ids == tokenizer.encode(text)
        completion = output.outputs[0]
        assert completion.token_ids == reference_greedy(tiny_reference, output.prompt_token_ids, 20)
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
    check_integrity(tiny_llm)


def test_logprobs_equal_transformers(tiny_llm, tiny_reference):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for output in tiny_llm.generate(TEXTS, params, use_tqdm=False):
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        reference = reference_logprobs(tiny_reference, prompt + completion.token_ids)
        assert output.prompt_logprobs is not None and completion.logprobs is not None
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
        positions = [*output.prompt_logprobs[1:], *completion.logprobs]
        for index, (found, num_top) in enumerate(zip(positions, [2] * (len(prompt) - 1) + [3] * 5, strict=True)):
            token_id = (prompt + completion.token_ids)[index + 1]
            row = reference[index]
            assert found is not None and token_id in found
            assert found[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            assert found[token_id].rank == 1 + int((row > row[token_id]).sum())
            top = torch.topk(row, num_top).indices.tolist()
            assert set(found) == {token_id, *top}
        expected = sum(completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids))
        assert completion.cumulative_logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("options", [
    dict(async_scheduling=False), dict(max_num_seqs=1), dict(max_num_batched_tokens=5),
    dict(num_gpu_blocks_override=34),  # hardly more than one sequence: preemptions
], ids=str)
def test_options_do_not_change_the_tokens(tiny_folder, tiny_llm, options):
    seeded = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(len(TEXTS))]
    expected = [[o.outputs[0].token_ids for o in tiny_llm.generate(TEXTS, params, use_tqdm=False)]
                for params in (GREEDY, seeded)]
    with LLM(str(tiny_folder), **(TINY_OPTIONS | options)) as llm:
        for params, wanted in zip(([GREEDY] * len(TEXTS), seeded), expected, strict=True):
            outputs = llm.generate(TEXTS, params, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == wanted
            backwards = llm.generate(TEXTS[::-1], params[::-1], use_tqdm=False)
            assert [o.outputs[0].token_ids for o in backwards[::-1]] == wanted
        check_integrity(llm)
        if "num_gpu_blocks_override" in options:
            assert llm._engine.scheduler.num_preemptions > 0


def test_prompts_come_in_many_forms(tiny_llm):
    ids = tiny_llm.get_tokenizer().encode("The fox")
    chat = [{"role": "user", "content": "Hi"}]
    single = [tiny_llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
              for p in ("The fox", ids, {"prompt": "The fox"}, {"prompt_token_ids": ids}, chat)]
    assert single[0] == single[1] == single[2] == single[3]
    many = tiny_llm.generate(["The fox", ids, chat], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in many] == [single[0], single[0], single[4]]
    assert tiny_llm.chat(chat, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == single[4]
    assert tiny_llm.generate([], GREEDY, use_tqdm=False) == []


def test_n_completions_are_distinct_and_reproducible(tiny_llm):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
    output, = tiny_llm.generate("The", params, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    tokens = [tuple(c.token_ids) for c in output.outputs]
    assert len(set(tokens)) == 3
    again, = tiny_llm.generate("The", params, use_tqdm=False)
    assert [tuple(c.token_ids) for c in again.outputs] == tokens


def test_bad_prompts_fail_alone(tiny_llm):
    outputs = tiny_llm.generate(["The", "x" * 500, [1, 10**6], [], "fox"], GREEDY, use_tqdm=False)
    assert [type(o.error) for o in outputs] == [type(None), PromptTooLongError, InvalidInputError, InvalidInputError,
                                                type(None)]
    assert "prompts[1]" in str(outputs[1].error) and "128" in str(outputs[1].error)
    assert outputs[0].outputs[0].token_ids and outputs[4].outputs[0].token_ids and not outputs[1].outputs
    with pytest.raises(InvalidInputError, match="at least one token"):
        tiny_llm.generate("", GREEDY, use_tqdm=False)
    check_integrity(tiny_llm)


def test_timing_is_filled_in(tiny_llm):
    metrics = tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].metrics
    times = [metrics.arrival_time_s, metrics.first_scheduled_time_s, metrics.first_token_time_s,
             metrics.last_token_time_s]
    assert times == sorted(times)
    assert metrics.queue_s >= 0 and metrics.time_to_first_token_s > 0


def test_interrupt_leaves_nothing_behind(tiny_llm, monkeypatch):
    engine, steps = tiny_llm._engine, 0
    real_step = engine.step

    def step():
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt
        return real_step()

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(KeyboardInterrupt):
        tiny_llm.generate(TEXTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    check_integrity(tiny_llm)
    assert tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].finished
