"""A model's text as a message: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.server.parsers import (
    ContentDelta,
    ReasoningDelta,
    ReasoningStream,
    ToolCallDelta,
    ToolParser,
    ToolStream,
    reasoning_parser,
)
from jaxserve.server.parsers import Delta as ParsedDelta
from jaxserve.server.responses import AssistantMessage, Delta, FunctionCall, ToolCallMessage


class MessageParser:
    """The texts of one request's choices, whole or in pieces.

    Args:
      tools: of calls, or None. reasoning: name of a parser, or None.
      keeps_reasoning: else it is taken out of the text and left out.
      parallel: else only the first tool call counts.
    """

    def __init__(self, tools: ToolParser | None, reasoning: str | None, *, keeps_reasoning: bool, parallel: bool):
        self._tools = tools
        self._reasoning = None if reasoning is None else reasoning_parser(reasoning)
        self._keeps_reasoning, self._parallel = keeps_reasoning, parallel
        self._begins_inside: bool | None = None
        self._choices: dict[int, _Choice] = {}

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text has to contain the model's special tokens: they mark its calls."""
        return self._tools is not None and self._tools.keep_special_tokens

    def set_prompt_end(self, text: str) -> None:
        """The end of the prompt: it may have opened the reasoning."""
        if self._reasoning is not None:
            self._begins_inside = self._reasoning.begins_inside(text)

    def has_calls(self, choice: int) -> bool:
        return choice in self._choices and self._choices[choice].has_calls

    def deltas(self, choice: int, text: str, *, is_last: bool) -> list[ParsedDelta]:
        """What more text of a choice makes certain."""
        if self._tools is None and self._reasoning is None:
            return [ContentDelta(text)] if text else []
        if choice not in self._choices:
            self._choices[choice] = _Choice(
                None if self._reasoning is None else self._reasoning.stream(self._begins_inside),
                None if self._tools is None else self._tools.stream())
        found = self._choices[choice].feed(text, is_last=is_last)
        return [delta for delta in found if not
                ((isinstance(delta, ReasoningDelta) and not self._keeps_reasoning)
                 or (isinstance(delta, ToolCallDelta) and delta.index > 0 and not self._parallel))]


class _Choice:
    """Text -> reasoning and content -> content and tool calls."""

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None):
        self._reasoning, self._tools = reasoning, tools
        self.has_calls = False

    def feed(self, text: str, *, is_last: bool) -> list[ParsedDelta]:
        deltas: list[ParsedDelta] = [ContentDelta(text)] if text else []
        if self._reasoning is not None:
            deltas = self._reasoning.feed(text) + (self._reasoning.finish() if is_last else [])
        if self._tools is not None:
            parsed: list[ParsedDelta] = []
            for delta in deltas:
                parsed += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
            deltas = parsed + (self._tools.finish() if is_last else [])
        self.has_calls |= any(isinstance(delta, ToolCallDelta) for delta in deltas)
        return deltas


def message(deltas: Iterable[ParsedDelta]) -> AssistantMessage:
    """A whole message from all its deltas. Without tool calls or reasoning its content is a text, if only an empty
    one."""
    content, reasoning, calls = "", "", dict[int, ToolCallMessage]()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallDelta(index, id, name, arguments):
                call = calls.setdefault(index, ToolCallMessage(
                    id=id, type="function", function=FunctionCall(name=name, arguments="")))
                call.function.arguments += arguments
    return AssistantMessage(content=content if content or not (calls or reasoning) else None,
                            reasoning_content=reasoning or None, tool_calls=list(calls.values()) or None)


def message_deltas(deltas: Iterable[ParsedDelta]) -> list[Delta]:
    """As chunks of a stream carry them."""
    return [_chunk(delta) for delta in deltas]


def _chunk(delta: ParsedDelta) -> Delta:
    match delta:
        case ContentDelta(text):
            return Delta(content=text)
        case ReasoningDelta(text):
            return Delta(reasoning_content=text)
        case ToolCallDelta(index, id, name, arguments):
            return Delta(tool_calls=[ToolCallMessage(
                index=index, id=id, type=None if id is None else "function",
                function=FunctionCall(name=name, arguments=arguments))])
