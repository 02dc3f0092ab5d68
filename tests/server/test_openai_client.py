"""The real client of OpenAI against the tiny Llama: every form of answer, equal to what `LLM` gives."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from jaxserve import SamplingParams
from tests.server.conftest import Running

PROMPT = "The quick brown"
CHAT = [{"role": "system", "content": "be"}, {"role": "user", "content": "fox"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
IGNORE_EOS = {"ignore_eos": True}


def reference(llm: Any, prompt: Any, **params: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params
    [output] = llm.generate(prompt, SamplingParams(**given), use_tqdm=False)
    return output


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_completion_whole_and_streamed_equal_generate(tiny: Running, tiny_llm: Any) -> None:
    right = reference(tiny_llm, PROMPT)
    whole = tiny.ai.completions.create(prompt=PROMPT, **GREEDY, extra_body=IGNORE_EOS)
    assert whole.choices[0].text == right.outputs[0].text and whole.choices[0].finish_reason == "length"
    assert whole.object == "text_completion" and whole.model == "tiny" and whole.id.startswith("cmpl-")
    assert whole.usage.prompt_tokens == len(right.prompt_token_ids) and whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(tiny.ai.completions.create(prompt=PROMPT, **GREEDY, extra_body=IGNORE_EOS, stream=True,
                                             stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == right.outputs[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert not chunks[-1].choices and counts(chunks[-1].usage) == counts(whole.usage)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, "the same prompt came before"
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id != whole.id
    assert len({chunk.system_fingerprint for chunk in [whole, *chunks]}) == 1


def test_kinds_of_prompts(tiny: Running, tiny_llm: Any) -> None:
    texts = [PROMPT, "fox"]
    token_ids = [tiny_llm.get_tokenizer().encode(text) for text in texts]
    right = [reference(tiny_llm, text).outputs[0].text for text in texts]
    for prompt in (texts, token_ids):
        found = tiny.ai.completions.create(prompt=prompt, **GREEDY, extra_body=IGNORE_EOS)
        assert [choice.text for choice in found.choices] == right
        assert [choice.index for choice in found.choices] == [0, 1]
        assert found.usage.prompt_tokens == sum(map(len, token_ids)) and found.usage.completion_tokens == 24
        streamed = ["", ""]
        for chunk in tiny.ai.completions.create(prompt=prompt, **GREEDY, extra_body=IGNORE_EOS, stream=True):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        assert streamed == right
    [choice] = tiny.ai.completions.create(prompt=token_ids[0], **GREEDY, extra_body=IGNORE_EOS).choices
    assert choice.text == right[0]


def test_n_completions_are_those_of_generate(tiny: Running, tiny_llm: Any) -> None:
    params: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    right = [completion.text for completion in reference(tiny_llm, "fox", **params).outputs]
    both = tiny.ai.completions.create(model="tiny", prompt=["fox", PROMPT], **params, extra_body=IGNORE_EOS)
    assert [choice.index for choice in both.choices] == list(range(6))
    assert [choice.text for choice in both.choices[:3]] == right
    assert both.usage.prompt_tokens == sum(len(tiny_llm.get_tokenizer().encode(p)) for p in ("fox", PROMPT))
    assert both.usage.completion_tokens == 36
    streamed = ["", "", ""]
    for chunk in tiny.ai.completions.create(model="tiny", prompt="fox", **params, extra_body=IGNORE_EOS, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == right


def test_sampling_fields_reach_the_engine(tiny: Running, tiny_llm: Any) -> None:
    """Each field changes the answer as it does for `LLM`."""
    greedy = reference(tiny_llm, PROMPT).outputs[0]
    first, second = greedy.token_ids[:2]
    variants: list[dict[str, Any]] = [
        {"logit_bias": {str(first): -100}}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
        {"repetition_penalty": 5.0}, {"allowed_token_ids": [5, 6, 7]}, {"stop_token_ids": [second]},
        {"stop": [greedy.text[2:4]]}, {"stop": greedy.text[2:4], "include_stop_str_in_output": True},
        {"bad_words": [greedy.text[:2]]}, {"temperature": 1.0, "seed": 7, "top_k": 5},
        {"temperature": 1.0, "seed": 7, "top_p": 0.5}, {"temperature": 1.0, "seed": 7, "min_p": 0.3},
        {"stop_token_ids": [second], "min_tokens": 4}, {"skip_special_tokens": False, "logit_bias": {"1": 100}},
        {"max_tokens": 3}]
    texts = set()
    for variant in variants:
        own = {key: value for key, value in variant.items() if key != "logit_bias"}
        if "logit_bias" in variant:
            own["logit_bias"] = {int(key): value for key, value in variant["logit_bias"].items()}
        right = reference(tiny_llm, PROMPT, **own).outputs[0]
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **IGNORE_EOS, **variant}
        [found] = tiny.post("/v1/completions", **body).json()["choices"]
        assert (found["text"], found["finish_reason"], found["stop_reason"]) == (
            right.text, right.finish_reason, right.stop_reason), variant
        texts.add(right.text)
    assert len(texts) > 8 and greedy.text not in texts, "the fields do something"


def test_chat_whole_and_streamed_equal_chat(tiny: Running, tiny_llm: Any) -> None:
    [right] = tiny_llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    whole = tiny.ai.chat.completions.create(messages=CHAT, **GREEDY, extra_body=IGNORE_EOS)
    assert whole.choices[0].message.content == right.outputs[0].text and whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len(right.prompt_token_ids) and whole.usage.completion_tokens == 12
    chunks = list(tiny.ai.chat.completions.create(
        messages=CHAT, model="tiny", temperature=0, max_completion_tokens=12, stream=True,
        stream_options={"include_usage": True}, extra_body=IGNORE_EOS))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == right.outputs[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert counts(chunks[-1].usage) == counts(whole.usage) and chunks[-1].object == "chat.completion.chunk"


def test_chat_options(tiny: Running, tiny_llm: Any) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "It"}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [right] = tiny_llm.chat(begun, params, continue_final_message=True, add_generation_prompt=False, use_tqdm=False)
    options = {"continue_final_message": True, "add_generation_prompt": False, **IGNORE_EOS}
    found = tiny.ai.chat.completions.create(messages=begun, **GREEDY, extra_body=options)
    assert found.choices[0].message.content == right.outputs[0].text
    assert found.usage.prompt_tokens == len(right.prompt_token_ids)
    parts = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "f"}, {"type": "text", "text": "ox"}]}]
    [right] = tiny_llm.chat(parts, params, use_tqdm=False)
    found = tiny.ai.chat.completions.create(messages=parts, **GREEDY, extra_body=IGNORE_EOS)
    assert found.choices[0].message.content == right.outputs[0].text
    several = tiny.ai.chat.completions.create(messages=CHAT, model="tiny", n=2, seed=1, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1] and several.usage.completion_tokens <= 10


def test_chat_logprobs(tiny: Running, tiny_llm: Any) -> None:
    [right] = tiny_llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
                            use_tqdm=False)
    request: dict[str, Any] = dict(messages=CHAT, model="tiny", temperature=0, max_tokens=6, logprobs=True,
                                   top_logprobs=3, extra_body=IGNORE_EOS)
    whole = tiny.ai.chat.completions.create(**request).choices[0].logprobs.content
    streamed = [entry for chunk in tiny.ai.chat.completions.create(**request, stream=True)
                if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    for found in (whole, streamed):
        assert "".join(entry.token for entry in found) == right.outputs[0].text
        for entry, position, token_id in zip(found, right.outputs[0].logprobs, right.outputs[0].token_ids,
                                             strict=True):
            assert entry.logprob == pytest.approx(position[token_id].logprob, abs=1e-4)
            assert bytes(entry.bytes) == entry.token.encode() and len(entry.top_logprobs) == 3
            best = sorted(position.values(), key=lambda each: each.rank)[:3]
            assert [top.token for top in entry.top_logprobs] == [each.decoded_token for each in best]
    none = tiny.ai.chat.completions.create(messages=CHAT, model="tiny", max_tokens=2, logprobs=True)
    assert none.choices[0].logprobs.content[0].top_logprobs == []


def test_prompt_logprobs(tiny: Running, tiny_llm: Any) -> None:
    right = reference(tiny_llm, PROMPT, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 1}
    [choice] = tiny.post("/v1/completions", **body).json()["choices"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(right)
    for found, position in zip(choice["prompt_logprobs"][1:], right[1:], strict=True):
        assert set(found) == {str(token_id) for token_id in position}
        for token_id, each in position.items():
            assert found[str(token_id)] == {"logprob": pytest.approx(each.logprob, abs=1e-4), "rank": each.rank,
                                            "decoded_token": each.decoded_token}


def test_models_and_tokens(tiny: Running, tiny_llm: Any) -> None:
    [model] = tiny.ai.models.list().data
    assert model.id == "tiny" and model.owned_by == "jaxserve" and tiny.ai.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        tiny.ai.completions.create(model="other", prompt="a")
    tokenizer = tiny_llm.get_tokenizer()
    found = tiny.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert found["tokens"] == tokenizer.encode(PROMPT) and "".join(found["token_strs"]) == PROMPT
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 128
    chat = tiny.post("/tokenize", messages=CHAT).json()["tokens"]
    assert chat == tokenizer.encode_chat(CHAT)
    text = tiny.post("/detokenize", tokens=chat).json()["prompt"]
    assert text == tokenizer.chat.render(CHAT)


def test_generate_endpoint(tiny: Running, tiny_llm: Any) -> None:
    right = PROMPT + reference(tiny_llm, PROMPT).outputs[0].text
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    assert tiny.post("/generate", **body).json() == {"text": [right]}
    lines = tiny.post("/generate", **body, stream=True).text.splitlines()
    texts = [json.loads(line)["text"][0] for line in lines]
    assert texts[-1] == right and all(right.startswith(text) for text in texts) and len(texts) > 3


def test_a_phone_agents_call(tiny: Running) -> None:
    """As Open-AutoGLM's client calls: streaming, parts of text; its images are for other models."""
    messages: list[Any] = [{"role": "system", "content": "Operate the phone."},
                           {"role": "user", "content": [{"type": "text", "text": "go"}]}]
    request: dict[str, Any] = dict(model="tiny", max_tokens=3000, temperature=0.0, top_p=0.85, frequency_penalty=0.2,
                                   extra_body={}, stream=True)
    text, reasons = "", []
    for chunk in tiny.ai.chat.completions.create(messages=messages, **request):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text and reasons[-1] in ("length", "stop") and set(reasons[:-1]) == {None}
    messages[1]["content"].append({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
    with pytest.raises(openai.BadRequestError, match="takes no images") as refused:
        tiny.ai.chat.completions.create(messages=messages, **request)
    assert refused.value.param == "messages[1].content[1].type" and "AAAA" not in str(refused.value)
