"""Messages are put together from parts, so that it is known what has to be found in them; and cut anywhere."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidInputError
from jaxserve.server.parsers import (
    ContentDelta,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
    ToolParser,
    reasoning_parser,
    tool_parser,
)

FORMATS = ["hermes", "llama3_json", "mistral"]
MARKERS = {"hermes": "<tool_call>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}


def parser(name: str) -> ToolParser:
    numbers = itertools.count()
    return tool_parser(name, lambda: f"id{next(numbers)}")


def call(index: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(f"id{index}", name, arguments)


def joined(name: str, pieces: Sequence[str]) -> ParsedMessage:
    """What a client puts together from the deltas, by OpenAI's rules."""
    stream = parser(name).stream()
    content, calls = "", dict[int, ToolCall]()
    for delta in [delta for piece in pieces for delta in stream.feed(piece)] + stream.finish():
        if isinstance(delta, ToolCallDelta):
            if delta.index not in calls:
                assert delta.id and delta.name and delta.index == len(calls)
                calls[delta.index] = ToolCall(delta.id, delta.name, delta.arguments)
            else:
                assert delta.id is None and delta.name is None and delta.index == len(calls) - 1
                last = calls[delta.index]
                calls[delta.index] = ToolCall(last.id, last.name, last.arguments + delta.arguments)
        else:
            assert isinstance(delta, ContentDelta) and delta.text
            content += delta.text
    return ParsedMessage(content if content or not calls else None, list(calls.values()))


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    """The text in pieces."""
    if draw(st.booleans()):
        return list(text)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


# ------------------------------------------------------------------------------------------------ well-formed messages

NAMES = st.from_regex(r"[A-Za-z_][\w.-]{0,12}", fullmatch=True).filter(str.isascii)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(['}"', "</tool_call>", "\\", "[TOOL_CALLS]", "{", "é\n", "<think>", "; {"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
ARGUMENTS = st.builds(json.dumps, st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
                      ensure_ascii=st.booleans(), indent=st.sampled_from([None, 0, 2]))
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
# No text with half a marker at its end or its beginning: the test would have to know what the two make together.
TEXT = st.from_regex(r"[^\W_][\w ,.\n]{0,15}", fullmatch=True)


def as_object(draw: st.DrawFn, name: str, arguments: str, key: str) -> str:
    members = [f'"name": {json.dumps(name)}', f'"{key}": {arguments}']
    if draw(st.booleans()):
        members.append('"type" : "function"')
    return "{" + ", ".join(draw(st.permutations(members))) + draw(st.sampled_from(["", " ", "\n"])) + "}"


@st.composite
def message(draw: st.DrawFn, name: str) -> tuple[str, str | None, list[tuple[str, str]]]:
    """(text, its content, its calls)."""
    calls = draw(CALLS)
    blank = st.sampled_from(["", " ", "\n", "\n\n"])
    key = draw(st.sampled_from(["arguments", "parameters"]))
    objects = [as_object(draw, *found, key) for found in calls]
    before, after = draw(TEXT | blank), draw(TEXT | blank)
    if name == "hermes":
        body = draw(blank).join(f"<tool_call>{draw(blank)}{one}{draw(blank)}</tool_call>" for one in objects)
    elif name == "llama3_json":
        tag = "<|python_tag|>" if before.strip() else draw(st.sampled_from(["", "<|python_tag|>"]))
        body = tag + draw(blank) + draw(st.sampled_from([";", "; ", "\n;\n"])).join(objects)
    elif draw(st.booleans()):
        body = f"[TOOL_CALLS]{draw(blank)}[" + draw(st.sampled_from([", ", ",", " ,\n"])).join(objects) + "]"
    else:
        between = draw(st.sampled_from(["", "[ARGS]", "[CALL_ID]abc123XYZ[ARGS]"]))
        body = draw(blank).join(f"[TOOL_CALLS]{one}{between}{arguments}" for one, arguments in calls)
    text = before.strip() and before
    # Whitespace is left out between and after calls, and before text that follows them.
    text += after.lstrip() if name == "llama3_json" else after.strip() and after
    return before + body + after, text or None, calls


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(name: str, data: st.DataObject) -> None:
    text, content, calls = data.draw(message(name))
    expected = ParsedMessage(content, [call(index, *one) for index, one in enumerate(calls)])
    assert parser(name).parse(text) == expected
    assert joined(name, data.draw(cut(text))) == expected


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cut_off_anywhere(name: str, data: st.DataObject) -> None:
    """As by max_tokens: calls before stay, the last one has a part of its arguments or is text (fault H13)."""
    text, _, calls = data.draw(message(name))
    text = text[: data.draw(st.integers(0, len(text)))]
    found = parser(name).parse(text)
    assert joined(name, data.draw(cut(text))) == found
    names = [one.name for one in found.tool_calls]
    assert names == [one for one, _ in calls][: len(names)]
    for index, one in enumerate(found.tool_calls):
        whole = calls[index][1]
        assert one.arguments and (one.arguments == whole if index + 1 < len(names) else whole.startswith(one.arguments))


# ------------------------------------------------------------------------------------------------------- any text

FRAGMENTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool", "_call>",
             "{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "name", '"name"', '"name": "f"', '"arguments"',
             '"arguments": {"a": 1}', '"parameters": {', '{"name": "g", "arguments": {}}', "null", "12", "é", "<", "f",
             '{"name": "f", ', '"arguments": "{}"', '"\\ud800"', '"x": [1, {"y": 2}]', "</", "[TOOL_", "<|"]
JUNK = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=400, deadline=None)
@given(text=JUNK, data=st.data())
def test_any_text_cut_anywhere(name: str, text: str, data: st.DataObject) -> None:
    found = parser(name).parse(text)
    assert joined(name, data.draw(cut(text))) == found
    if not found.tool_calls:
        assert found.content == text


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=200, deadline=None)
@given(text=JUNK, data=st.data())
def test_text_without_a_call_is_released_as_soon_as_it_is_known(name: str, text: str, data: st.DataObject) -> None:
    """Held back is at most a part of a marker, or whitespace that may be followed by one."""
    text = "Hello " + re.sub(re.escape(MARKERS[name]), "", text)
    stream, shown = parser(name).stream(), ""
    pieces = data.draw(cut(text))
    for piece, end in zip(pieces, itertools.accumulate(map(len, pieces)), strict=True):
        for delta in stream.feed(piece):
            assert isinstance(delta, ContentDelta)
            shown += delta.text
        held = text[len(shown):end]
        assert text.startswith(shown) and MARKERS[name].startswith(held) and held != MARKERS[name]


def test_nothing_is_lost_around_a_call_that_breaks() -> None:
    """Every character of the text is in the content, in the arguments, or in what a call is made of."""
    for text in ['a<tool_call>{"name": 5}</tool_call>b', 'a<tool_call>nothing</tool_call>b', "<tool_call></tool_call>b",
                 'a<tool_call>{"name": "f"}</tool_call>b', 'a<tool_call>{"arguments": {}}</tool_call>b',
                 'a<tool_call>{"name": "f", "arguments": [1]}</tool_call>b', '<tool_call>{"name": "", "arguments": {}}',
                 '<tool_call>{"name": "f", "name": "g", "arguments": {}}', '<tool_call>[{"name": "f"}]</tool_call>']:
        assert parser("hermes").parse(text) == ParsedMessage(text, [])
    for text in ['{"name": "Bob", "age": 3}', '{"answer": {"name": "f", "parameters": {}}}', "{", '{"name": "f"}',
                 'Sure: {"name": "f", "parameters": {}}', '{"name": "f", "parameters": 3}', "<|python_tag|>print(1)"]:
        assert parser("llama3_json").parse(text) == ParsedMessage(text, [])
    for text in ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS] {}", "[TOOL_CALLS]two words{}", "[TOOL_CALLS]f[ARG]{}",
                 '[{"name": "f", "arguments": {}}]']:
        assert parser("mistral").parse(text) == ParsedMessage(text, [])


F = call(0, "f", '{"a": 1}')


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', ParsedMessage(None, [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', ParsedMessage(None, [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', ParsedMessage("}", [F])),
    ("hermes", '<tool_call><tool_call>{"name": "f", "arguments": {"a": 1}}', ParsedMessage("<tool_call>", [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>.', ParsedMessage(".", [F])),
    ("hermes", '<tool_call>{"name": "f", "thought": "x}", "n": 1.5, "arguments": {"a": 1}}</tool_call>',
     ParsedMessage(None, [F])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": </tool_call>\nSorry.',
     ParsedMessage("\nSorry.", [call(0, "f", '{"a": {"b": ')])),
    ("hermes", "Use {'name': 'f'} or <tool_cal", ParsedMessage("Use {'name': 'f'} or <tool_cal", [])),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', ParsedMessage(None, [F])),
    ("llama3_json", 'Yes.<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ParsedMessage("Yes.", [F])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; and more', ParsedMessage("and more", [F])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"x": 1}', ParsedMessage('{"x": 1}', [F])),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, oops]', ParsedMessage("oops]", [F])),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', ParsedMessage(None, [F, call(1, "g", "{}")])),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', ParsedMessage(None, [F])),
    ("mistral", "", ParsedMessage("", [])),
])
def test_what_models_also_write(name: str, text: str, expected: ParsedMessage) -> None:
    assert parser(name).parse(text) == expected == joined(name, list(text))


def test_arguments_stream_while_they_arrive() -> None:
    stream = parser("hermes").stream()
    assert stream.feed('Wait. <tool_call>{"name": "f", "argu') == [ContentDelta("Wait. ")]
    assert stream.feed('ments": ') == []
    assert stream.feed('{"a"') == [ToolCallDelta(0, "id0", "f"), ToolCallDelta(0, arguments='{"a"')]
    assert stream.feed(": 1") == [ToolCallDelta(0, arguments=": 1")]
    assert stream.feed("}}\n</tool_call> ") == [ToolCallDelta(0, arguments="}")]
    assert stream.finish() == []


def test_time_is_linear_in_the_text() -> None:
    """An attempt that fails at the very end must not be repeated for each marker: 5,000 times the text."""
    for name, head in [("hermes", '<tool_call>{"a":['), ("llama3_json", '<|python_tag|>{"name":"'),
                       ("mistral", '[TOOL_CALLS][{"a":[')]:
        text, start = head * 5_000, time.process_time()
        assert joined(name, [text]).content == text
        assert time.process_time() - start < 10  # a tenth of a second where it is linear, else minutes


def test_ids_are_new_and_fit_the_templates() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = {tool_parser("hermes").parse(text).tool_calls[0].id for _ in range(50)}
    assert len(ids) == 50 and all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in ids)
    found = tool_parser("mistral").parse("[TOOL_CALLS]f{}").tool_calls[0].id
    assert re.fullmatch("[A-Za-z0-9]{9}", found)  # checked by Mistral's own templates


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"tool_call_parser='pythonic'.*hermes, llama3_json, mistral"):
        tool_parser("pythonic")
    with pytest.raises(InvalidInputError, match=r"reasoning_parser='o1'.*deepseek_r1, qwen3"):
        reasoning_parser("o1")


# ----------------------------------------------------------------------------------------------------------- reasoning

def thought(text: str, inside: bool) -> tuple[str | None, str | None]:
    """Looks at the whole text at once."""
    found = re.fullmatch(r"\s*<think>\s*(.*)", text, re.DOTALL)
    if not found and not inside:
        return None, text
    body = found[1] if found else text.lstrip()
    parts = re.fullmatch(r"(.*?)\s*</think>\s*(.*)", body, re.DOTALL)
    reasoning, content = (parts[1], parts[2]) if parts else (body, "")
    return reasoning or None, content or (None if reasoning else "")


@settings(max_examples=600, deadline=None)
@given(text=st.lists(st.sampled_from(["<think>", "</think>", "<think", "</", ">", " ", "\n", "a", "b c", "<"]),
                     max_size=12).map("".join), inside=st.booleans(), data=st.data())
def test_reasoning_cut_anywhere(text: str, inside: bool, data: st.DataObject) -> None:
    parser = reasoning_parser("qwen3")
    found = parser.parse(text, inside)
    assert (found.reasoning_content, found.content) == thought(text, inside)
    stream = parser.stream(inside)
    deltas = [delta for piece in data.draw(cut(text)) for delta in stream.feed(piece)] + stream.finish()
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    assert (reasoning or None, content or (None if reasoning else "")) == (found.reasoning_content, found.content)


def test_where_reasoning_begins() -> None:
    qwen, deepseek = reasoning_parser("qwen3"), reasoning_parser("deepseek_r1")
    assert qwen.parse("A tag: <think>x</think>").reasoning_content is None
    assert qwen.parse("<think>\nHm.\n</think>\n\nYes.") == qwen.parse("Hm.</think>Yes.", inside=True)
    assert deepseek.parse("Hm.\n</think>\n\nYes.") == deepseek.parse("<think>Hm.</think>Yes.")
    assert deepseek.parse("Hm. And so on").content is None
    assert qwen.begins_inside("<|im_start|>assistant\n<think>\n") and deepseek.begins_inside("Assistant:")
    assert not qwen.begins_inside("<think>\n\n</think>\n\n")


def test_reasoning_is_released_as_soon_as_it_is_known() -> None:
    stream = reasoning_parser("qwen3").stream()
    assert stream.feed("<thi") == []
    assert stream.feed("nk>\nLet us") == [ReasoningDelta("Let us")]
    assert stream.feed(" see </th") == [ReasoningDelta(" see")]
    assert stream.feed("ree") == [ReasoningDelta(" </three")]
    assert stream.feed("</think>\n\nYes") == [ContentDelta("Yes")]
    assert stream.feed(" <think>") == [ContentDelta(" <think>")]
    assert stream.finish() == []
