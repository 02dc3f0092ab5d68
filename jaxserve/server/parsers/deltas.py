"""What the parsers give: a whole message, or its pieces as they arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """More of the text that the user sees."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the text that the model wrote to itself."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a tool call.

    Attributes:
      index: the call's number in this message.
      id, name: in the call's first piece only.
      arguments: more text of the arguments; the pieces join to what the model wrote.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Delta = ContentDelta | ReasoningDelta | ToolCallDelta


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants called.

    Attributes:
      arguments: a JSON object as text, as the model wrote it. Not complete if the output was cut off inside it, and as
        with OpenAI not always valid: whoever calls the function checks it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedMessage:
    """A message taken apart.

    Attributes:
      content: None if there is nothing but calls.
    """

    content: str | None
    tool_calls: list[ToolCall]


@dataclass(frozen=True)
class ParsedReasoning:
    """A message taken apart.

    Attributes:
      reasoning_content: None if there is none.
      content: None if there is nothing but reasoning.
    """

    reasoning_content: str | None
    content: str | None


def append(deltas: list[Delta], new: Delta) -> None:
    """Adds a piece, joined with the one before where both are text of the same kind and place."""
    last = deltas[-1] if deltas else None
    match last, new:
        case (ContentDelta(a), ContentDelta(b)):
            deltas[-1] = ContentDelta(a + b)
        case (ReasoningDelta(a), ReasoningDelta(b)):
            deltas[-1] = ReasoningDelta(a + b)
        case (ToolCallDelta(index, None, None, a), ToolCallDelta(same, None, None, b)) if index == same:
            deltas[-1] = ToolCallDelta(index, arguments=a + b)
        case _:
            deltas.append(new)


def joined_message(deltas: Iterable[Delta]) -> ParsedMessage:
    """The message whose stream these deltas are."""
    content: list[str] = []
    calls: list[tuple[str, str, list[str]]] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content.append(text)
            case ToolCallDelta(_, str(id), str(name), arguments):
                calls.append((id, name, [arguments]))
            case ToolCallDelta(index, _, _, arguments):
                calls[index][2].append(arguments)
    return ParsedMessage(
        content="".join(content) if content or not calls else None,
        tool_calls=[ToolCall(id, name, "".join(arguments)) for id, name, arguments in calls])


def joined_reasoning(deltas: Iterable[Delta]) -> ParsedReasoning:
    """The message whose stream these deltas are."""
    texts: dict[type, list[str]] = {ReasoningDelta: [], ContentDelta: []}
    for delta in deltas:
        if isinstance(delta, ReasoningDelta | ContentDelta):
            texts[type(delta)].append(delta.text)
    reasoning, content = texts[ReasoningDelta], texts[ContentDelta]
    return ParsedReasoning(
        reasoning_content="".join(reasoning) if reasoning else None,
        content="".join(content) if content or not reasoning else None)


def overlap(text: str, marker: str) -> int:
    """So many characters at the end of `text` may be the beginning of `marker`."""
    return next((size for size in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:size])), 0)
