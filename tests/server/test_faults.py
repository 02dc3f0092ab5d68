"""Faults that other servers had, over HTTP, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve import LLM
from tests.faults.scripted import Vocabulary
from tests.server.conftest import Running
from tests.tiny import reference_logprobs

JOINED = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}]


def chunks(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream, which has to be whole."""
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def both(server: Running, path: str, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    whole = server.post(path, **body)
    assert whole.status_code == 200, whole.text
    return whole.json(), chunks(server.post(path, **body, stream=True))


def test_stop_strings_of_several_tokens_do_not_leak(scripted: Callable[..., Running]) -> None:
    vocabulary = Vocabulary(["DEF", "G", "HI", "J", "K", "Paris", "in "])
    server = scripted(vocabulary, {"a": [*vocabulary.ids("DEF", "G", "HI", "J", "K"), vocabulary.eos],
                                   "b": [*vocabulary.ids("in ", "Paris", "K"), vocabulary.eos]})
    for prompt, options, text in (("a", {"stop": "DEFGHIJ"}, ""), ("b", {"stop": ["Pari"]}, "in "),
                                  ("a", {"stop": "DEFGHIJ", "include_stop_str_in_output": True}, "DEFGHIJ"),
                                  ("a", {"stop": "DEFGHIX"}, "DEFGHIJK")):
        whole, streamed = both(server, "/v1/completions", prompt=prompt, temperature=0, **options)
        [choice] = whole["choices"]
        assert choice["text"] == text and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (None if text == "DEFGHIJK" else "Pari" if prompt == "b" else "DEFGHIJ")
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == text
        assert [c["choices"][0]["finish_reason"] for c in streamed][-1] == "stop"


def test_broken_utf8_harms_nobody(scripted: Callable[..., Running]) -> None:
    emoji = "😀".encode()
    vocabulary = Vocabulary([b"\xe6\x97", emoji[:2], emoji[2:], "ok"])
    script = vocabulary.ids(b"\xe6\x97", "ok", emoji[:2], emoji[2:])
    server = scripted(vocabulary, {"a": [*script, vocabulary.eos], "b": [*vocabulary.ids("ok", "ok"), vocabulary.eos]})
    whole, streamed = both(server, "/v1/completions", prompt=["a", "b"], temperature=0)
    assert [choice["text"] for choice in whole["choices"]] == ["�ok😀", "okok"]
    joined = ["", ""]
    for chunk in streamed:
        [choice] = chunk["choices"]
        joined[choice["index"]] += choice["text"]
    assert joined == ["�ok😀", "okok"]
    assert sum(chunk["choices"][0]["text"].count("�") for chunk in streamed) == 1


@pytest.mark.parametrize("max_tokens", [5, 0])
def test_echo_with_logprobs(tiny: Running, tiny_llm: LLM, tiny_reference: Any, max_tokens: int) -> None:
    prompt = "\n1 2 日本 fox"
    ids = tiny_llm.get_tokenizer().encode(prompt)
    whole, streamed = both(tiny, "/v1/completions", prompt=prompt, temperature=0, echo=True, logprobs=1,
                           max_tokens=max_tokens, ignore_eos=True)
    [choice] = whole["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith(prompt) and "".join(found["tokens"]) == choice["text"]
    assert {len(values) for values in found.values()} == {len(ids) + max_tokens}
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    right = reference_logprobs(tiny_reference, ids)
    for position, token_id in enumerate(ids[1:]):
        assert found["token_logprobs"][position + 1] == pytest.approx(float(right[position, token_id]), abs=1e-3)
        assert max(found["top_logprobs"][position + 1].values()) == pytest.approx(float(right[position].max()),
                                                                                  abs=1e-3)
    assert whole["usage"]["completion_tokens"] == max_tokens and choice["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]
    for name, values in found.items():
        parts = [value for chunk in streamed for value in chunk["choices"][0]["logprobs"][name]]
        assert parts == [pytest.approx(v, abs=1e-3) if isinstance(v, float | dict) else v for v in values], name


def test_an_empty_prompt_is_refused_unless_a_bos_makes_it_one(scripted: Callable[..., Running]) -> None:
    from tokenizers import processors

    vocabulary = Vocabulary(["x"])
    server = scripted(vocabulary, {"a": [*vocabulary.ids("x"), vocabulary.eos]})
    empty: list[Any] = ["", [""], [], [[]]]
    for prompt in empty:
        assert server.post("/v1/completions", prompt=prompt).status_code == 400
    with_bos = Vocabulary(["x", "<s>"])
    bos = with_bos.ids("<s>")[0]
    with_bos.tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", bos)])
    server = scripted(with_bos, {"<": [*with_bos.ids("x"), with_bos.eos], "<s>": []})
    answer = server.post("/v1/completions", prompt="", max_tokens=2)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 1
    assert server.post("/v1/completions", prompt=[""], max_tokens=2).json()["usage"]["prompt_tokens"] == 1


def test_logit_bias_over_http(tiny: Running) -> None:
    body = {"prompt": "fox", "temperature": 0, "max_tokens": 2, "logprobs": 1}
    plain = tiny.post("/v1/completions", **body).json()["choices"][0]
    assert tiny.post("/v1/completions", **body, logit_bias={}).json()["choices"][0] == plain
    for bad in ({"100000": 1}, {"-1": 1}, {"word": 1}):
        refused = tiny.post("/v1/completions", **body, logit_bias=bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"
    forced = tiny.post("/v1/completions", **body, logit_bias={"40": 100}, return_tokens_as_token_ids=True).json()
    assert forced["choices"][0]["logprobs"]["tokens"] == ["token_id:40"] * 2
    assert all(-1000 < value < 0 for value in forced["choices"][0]["logprobs"]["token_logprobs"])


def test_bos_comes_once(scripted: Callable[..., Running]) -> None:
    from tokenizers import AddedToken, processors

    vocabulary = Vocabulary([])
    backend = vocabulary.tokenizer.backend
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", bos)])
    for template, expected, more in ((f"<s>{JOINED}", 1, {}), (JOINED, 0, {}),
                                     (JOINED, 1, {"add_special_tokens": True})):
        server = scripted(vocabulary, {"a": []}, chat_template=template)
        messages = [{"role": "user", "content": "abc"}]
        found = server.post("/tokenize", messages=messages, **more).json()["tokens"]
        assert found.count(bos) == expected and len(found) == 3 + expected
        usage = server.post("/v1/chat/completions", messages=messages, max_tokens=1, **more).json()["usage"]
        assert usage["prompt_tokens"] == len(found)
        assert server.post("/tokenize", prompt="abc").json()["tokens"].count(bos) == 1
        assert server.post("/v1/completions", prompt="abc", max_tokens=1).json()["usage"]["prompt_tokens"] == 4


def test_a_tool_call_that_was_cut_off_is_none_that_finished(scripted: Callable[..., Running]) -> None:
    arguments = '{"text": "' + "long " * 6 + '"}'
    pieces = ["<tool_call>", '{"name": "write", "arguments": ', *[arguments[i : i + 4]
                                                                   for i in range(0, len(arguments), 4)],
              "}", "</tool_call>"]
    vocabulary = Vocabulary(pieces)
    server = scripted(vocabulary, {"a": [*vocabulary.ids(*pieces), vocabulary.eos]}, chat_template=JOINED,
                      enable_auto_tool_choice=True, tool_call_parser="hermes")
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "temperature": 0}
    for max_tokens, reason in ((100, "tool_calls"), (6, "length")):
        whole, streamed = both(server, "/v1/chat/completions", **body, max_tokens=max_tokens)
        [choice] = whole["choices"]
        assert choice["finish_reason"] == reason
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "write" and choice["message"]["content"] is None
        calls = [piece for chunk in streamed for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
        joined = "".join(piece["function"]["arguments"] for piece in calls)
        assert joined == call["function"]["arguments"] and arguments.startswith(joined)
        if reason == "tool_calls":
            assert json.loads(joined) == json.loads(arguments)
        assert [piece["function"].get("name") for piece in calls if "id" in piece] == ["write"]
        assert calls[0]["type"] == "function" and {piece["index"] for piece in calls} == {0}
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in streamed]
        assert [each for each in reasons if each] == [reason] and reasons[-1] == reason
    plain, _ = both(server, "/v1/chat/completions", **body, tool_choice="none")
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["choices"][0]["message"]["content"].startswith("<tool_call>")


def test_reasoning_comes_apart(scripted: Callable[..., Running]) -> None:
    pieces = ["<think>", "hm", "m", "</think>", "yes"]
    vocabulary = Vocabulary(pieces)
    server = scripted(vocabulary, {"a": [*vocabulary.ids(*pieces), vocabulary.eos]}, chat_template=JOINED,
                      reasoning_parser="qwen3")
    whole, streamed = both(server, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "yes")
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hmm"
    assert "".join(delta.get("content", "") for delta in deltas) == "yes"


def test_usage_comes_only_to_those_who_ask(scripted: Callable[..., Running]) -> None:
    vocabulary = Vocabulary(["x", "y"])
    server = scripted(vocabulary, {"a": [*vocabulary.ids("x", "y"), vocabulary.eos]}, chat_template=JOINED)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a"})):
        usage = server.post(path, **body).json()["usage"]
        assert usage["completion_tokens"] == 3 and usage["prompt_tokens"] == 1
        without: list[dict[str, Any]] = [{}, {"stream_options": {}}, {"stream_options": None},
                                         {"stream_options": {"include_usage": False}}]
        for options in without:
            assert not any(c.get("usage") for c in chunks(server.post(path, **body, **options, stream=True)))
        *others, last = chunks(server.post(path, **body, stream=True, stream_options={"include_usage": True}))
        assert last["choices"] == [] and last["usage"] == usage and not any(c.get("usage") for c in others)
        always = {"include_usage": True, "continuous_usage_stats": True}
        found = [c["usage"]["completion_tokens"] for c in chunks(server.post(path, **body, stream=True,
                                                                             stream_options=always))]
        assert found == sorted(found) and found[-1] == 3 and len(set(found)) > 2
        refused = server.post(path, **body, stream_options={"include_usage": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("body", [{"prompt": "fox"}, {"prompt": [[102, 103], [97]]},
                                  {"messages": [{"role": "user", "content": "fox"}], "logprobs": True}], ids=str)
def test_token_ids_if_asked(tiny: Running, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    body = body | {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    plain = tiny.post(path, **body).json()
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in {**plain, **plain["choices"][0]}
    whole, streamed = both(tiny, path, **body, return_token_ids=True)
    prompts: dict[int, list[int]] = {}
    joined: dict[int, list[int]] = {choice["index"]: [] for choice in whole["choices"]}
    for chunk in streamed:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice.get("token_ids") or []
            for holder in (chunk, choice):
                if "prompt_token_ids" in holder:
                    assert choice["index"] not in prompts, "once"
                    prompts[choice["index"]] = holder["prompt_token_ids"]
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 9 and joined[choice["index"]] == choice["token_ids"]
        assert prompts[choice["index"]] == choice.get("prompt_token_ids", whole.get("prompt_token_ids"))
    assert sum(map(len, prompts.values())) == whole["usage"]["prompt_tokens"]
