"""Answers of a given form, and enforced tool calls, from a model that knows nothing of either."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.conftest import Running

HI = [{"role": "user", "content": "a"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA | {"properties": {key: {"enum": [1, 22]}},
                                                                                 "required": [key]}}}
         for name, key in (("add", "x"), ("drop", "y"))]
MORE: dict[str, Any] = {"temperature": 1, "seed": 4, "max_tokens": 90}


@pytest.fixture(autouse=True)
def terse(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model would fill its tokens with space, which JSON allows."""
    vocabulary = tiny.llm.get_tokenizer().backend.get_vocab()
    monkeypatch.setitem(MORE, "logit_bias", {token_id: -100 for token, token_id in vocabulary.items()
                                             if not set(token) - set("ĠĊĉč")})


def value(text: str) -> int:
    found = json.loads(text)
    assert set(found) == {"n"} and 0 <= found["n"] <= 99
    return found["n"]


@pytest.mark.parametrize("form", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
], ids=str)
def test_json_schema(tiny: Running, form: dict[str, Any]) -> None:
    chat = tiny.ai.chat.completions.create(model="tiny", messages=HI, **MORE, **form).choices[0]
    streamed = tiny.ai.chat.completions.create(model="tiny", messages=HI, stream=True, **MORE, **form)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert chat.finish_reason == "stop" and value(chat.message.content) == value(text)
    if "extra_body" in form:  # the client knows no response_format here
        value(tiny.ai.completions.create(model="tiny", prompt="a", **MORE, **form).choices[0].text)
    tiny.settle()


def test_other_forms(tiny: Running) -> None:
    def answer(**form: Any) -> str:
        return tiny.ai.completions.create(model="tiny", prompt="a", extra_body=form, **MORE).choices[0].text

    assert re.fullmatch("[ab]{3}", answer(guided_regex="[ab]{3}"))
    assert answer(guided_choice=["yes", "no"]) in ("yes", "no")
    assert answer(structured_outputs={"grammar": "root ::= \"x\" \"y\""}) == "xy"
    generated = tiny.post("/generate", prompt="a", structured_outputs={"choice": ["zz"]}, max_tokens=9).json()
    assert generated["text"] == ["azz"]
    text = tiny.ai.chat.completions.create(model="tiny", messages=HI, response_format={"type": "json_object"},
                                           temperature=0, max_tokens=60).choices[0].message.content
    assert text.lstrip().startswith("{")  # cut off or whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_enforced_calls(tiny: Running, named: bool, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "drop"}} if named else "required"
    answer = tiny.ai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice=choice, stream=stream,
                                             parallel_tool_calls=False, **MORE)
    calls: list[list[str]] = []
    if stream:
        for chunk in answer:
            delta = chunk.choices[0].delta
            assert not delta.content
            for piece in delta.tool_calls or []:
                if piece.function.name:
                    calls.append([piece.function.name, ""])
                calls[piece.index][1] += piece.function.arguments or ""
            reason = chunk.choices[0].finish_reason
    else:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        assert not message.content
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls]
    assert reason == "tool_calls" and len(calls) == 1
    name, arguments = calls[0]
    assert name in (("drop",) if named else ("add", "drop"))
    assert json.loads(arguments) in [{"x" if name == "add" else "y": number} for number in (1, 22)]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}], ids=str)
def test_a_call_that_is_cut_off_is_no_text(tiny: Running, choice: Any) -> None:
    body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": choice, **MORE}
    for max_tokens in (1, 3, 5):
        body["max_tokens"] = max_tokens
        cut = tiny.post("/v1/chat/completions", **body).json()["choices"][0]
        assert cut["finish_reason"] == "length" and not cut["message"]["content"]
        chunks = tiny.ai.chat.completions.create(model="tiny", stream=True, **body)
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_a_conversation_goes_on_after_a_call(tiny: Running) -> None:
    called = tiny.ai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="required",
                                             parallel_tool_calls=False, **MORE).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "3"}
    assert called.content is None
    tiny.ai.chat.completions.create(model="tiny", messages=[*HI, called, result], max_tokens=2)
    tiny.ai.chat.completions.create(model="tiny", messages=[*HI, called.model_dump(), result], max_tokens=2)


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_function_without_parameters_takes_none(tiny: Running, parameters: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now"} | ({} if parameters is None else
                                                                     {"parameters": parameters})}]
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        [call] = tiny.ai.chat.completions.create(model="tiny", messages=HI, tools=tools, tool_choice=choice,
                                                 parallel_tool_calls=False, **MORE).choices[0].message.tool_calls
        assert call.function.name == "now" and json.loads(call.function.arguments) == {}


@pytest.mark.parametrize(("choice", "said"), [
    ({"type": "function", "function": {"name": "nope"}}, "NAME one of add, drop"),
    ({"type": "function"}, "NAME one of add, drop"),
])
def test_a_tool_that_is_not_there(tiny: Running, choice: Any, said: str) -> None:
    answer = tiny.post("/v1/chat/completions", messages=HI, tools=TOOLS, tool_choice=choice)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice"
    assert said in answer.json()["error"]["message"]


def test_a_form_that_becomes_too_complex_is_told(tiny: Running) -> None:
    grammar = "start: " + " | ".join(f'"z{number}"' for number in range(3000))
    body: dict[str, Any] = {"prompt": "a", "guided_grammar": grammar, **MORE}
    refused = tiny.post("/v1/completions", **body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "guided_grammar"
    events = tiny.post("/v1/completions", **body, stream=True).text.split("\n\n")
    assert "error" in json.loads(events[-3].removeprefix("data: ")) and events[-2] == "data: [DONE]"
    tiny.settle()
