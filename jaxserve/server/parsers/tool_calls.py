"""Tool calls in the text that models write, taken out while the text arrives.

What is no call stays content, character for character: a call counts once its name and the beginning of its arguments
are there, and is text up to then. Only whitespace before, between and after calls is left out, and what the format puts
around calls. How the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from jaxserve.server.parsers.deltas import (
    ContentDelta,
    Delta,
    ParsedMessage,
    ToolCallDelta,
    append,
    joined_message,
    overlap,
)
from jaxserve.server.parsers.json_call import Call, JsonCall, NamedCall


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def new_mistral_id() -> str:
    """Mistral's chat templates accept nine letters and digits only."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolStream(ABC):
    """One message. A state is a method that consumes input and returns whether it could; formats add states.

    Args:
      new_id: makes the calls' ids.
    """

    def __init__(self, new_id: Callable[[], str]):
        self._new_id = new_id
        self._state: Callable[[], bool] = self._content
        self._input = ""  # not consumed
        self._opening = ""  # consumed on the way to the call that is being read: text if it turns out to be none
        self._call: Call | None = None
        self._announced = False  # that call
        self._num_calls = 0
        self._blank = ""  # whitespace of which it isn't known whether text follows
        self._speaking = False  # text has come since the last call
        self._deltas: list[Delta] = []

    def feed(self, delta: str) -> list[Delta]:
        """Takes more text and returns what it makes certain."""
        self._input += delta
        while self._input and self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Ends the message and returns the rest: a call whose arguments have begun stays one, cut off where it is."""
        if not self._num_calls or not self._ending():
            held = self._call.held() if self._call and not self._announced else ""
            self._say(self._opening + held + self._input)
        if not self._num_calls and self._blank:
            append(self._deltas, ContentDelta(self._blank))
        self._input = ""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    @abstractmethod
    def _markers(self) -> Sequence[str]:
        """What is looked for in text."""

    @abstractmethod
    def _found(self, marker: str) -> None:
        """Sets the state after a marker."""

    @abstractmethod
    def _call_done(self) -> None:
        """Sets the state after a call."""

    def _call_broken(self) -> None:
        """Sets the state where a call, or what was to be one, ends in something that cannot stand there."""
        self._state = self._content

    def _ending(self) -> bool:
        """Whether input that is left when the text ends belongs to the end of a call, and not to the text."""
        return False

    def _content(self) -> bool:
        found = [(at, marker) for marker in self._markers if (at := self._input.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._say(self._input[:at])
            self._input = self._input[at + len(marker):]
            self._found(marker)
            return True
        keep = max(overlap(self._input, marker) for marker in self._markers)
        end = len(self._input) - keep
        self._say(self._input[:end])
        self._input = self._input[end:]
        return not keep

    def _read(self, call: Call, opening: str) -> None:
        """Sets the state that reads a call.

        Args:
          opening: what was consumed on the way to it.
        """
        self._call, self._opening, self._announced, self._state = call, opening, False, self._reading

    def _reading(self) -> bool:
        assert self._call is not None
        call, consumed, fits = self._call, 0, True
        while consumed < len(self._input) and not call.done and (fits := call.push(self._input[consumed])):
            consumed += 1
        self._input = self._input[consumed:]
        if arguments := call.take():
            self._argue(arguments)
        if call.done:
            self._call = None
            self._call_done()
        elif not fits:
            self._call, opening = None, self._opening
            self._opening = ""
            self._call_broken()
            self._say(opening + call.held())
        return True

    def _argue(self, arguments: str) -> None:
        assert self._call is not None
        if not self._announced:
            append(self._deltas, ToolCallDelta(self._num_calls, self._new_id(), self._call.name))
            self._num_calls += 1
            self._announced, self._speaking, self._blank, self._opening = True, False, "", ""
        append(self._deltas, ToolCallDelta(self._num_calls - 1, arguments=arguments))

    def _say(self, text: str) -> None:
        if not self._speaking:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return
            self._speaking = True
        if text:
            append(self._deltas, ContentDelta(text))


class HermesStream(ToolStream):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, in any text. Hermes, Qwen 2.5 and 3.

    The end may be missing, or closing braces before it.
    """

    START, END = "<tool_call>", "</tool_call>"
    _open = False  # between the two, where END isn't text

    @property
    def _markers(self) -> Sequence[str]:
        return (self.START, self.END) if self._open else (self.START,)

    def _found(self, marker: str) -> None:
        self._open = False
        if marker == self.START:
            self._read(JsonCall(other_keys=True, never="<"), marker)

    def _call_done(self) -> None:
        self._open, self._state = True, self._closing

    def _call_broken(self) -> None:
        self._open, self._state = self._announced, self._content

    def _closing(self) -> bool:
        self._input = self._input.lstrip()
        if self.END.startswith(self._input):
            return False
        self._state = self._content
        return True

    def _ending(self) -> bool:
        return self._state == self._closing


class LlamaStream(ToolStream):
    """`{"name": ..., "parameters": {...}}`, where the text begins or after `<|python_tag|>`, and further calls after a
    semicolon: Llama 3.1 and 3.2.

    Nothing else marks a call, so an object with other members is text.
    """

    TAG = "<|python_tag|>"
    _markers = (TAG,)

    def __init__(self, new_id: Callable[[], str]):
        super().__init__(new_id)
        self._state = self._beginning

    def _beginning(self) -> bool:
        rest = self._input.lstrip("; \t\r\n" if self._num_calls else None)
        if not rest:
            return False
        blank = "" if self._num_calls else self._input[: len(self._input) - len(rest)]
        if rest[0] == "{":
            self._read(JsonCall(other_keys=False), blank)
            self._input = rest
        else:
            self._input, self._state = blank + rest, self._content
        return True

    def _found(self, marker: str) -> None:
        self._read(JsonCall(other_keys=False), marker)

    def _call_done(self) -> None:
        self._state = self._beginning

    def _ending(self) -> bool:
        return self._state == self._beginning


class MistralStream(ToolStream):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and of newer models `[TOOL_CALLS]name{...}`, with
    `[CALL_ID]...` and `[ARGS]` after the name or without."""

    _markers: Sequence[str] = ("[TOOL_CALLS]",)
    _HEAD = re.compile(r"([\w.-]{1,256})\s{0,16}(\[CALL_ID\][\w-]{1,64})?(\[ARGS\])?\s{0,16}(?={)")
    _LONGEST_END = "x[CALL_ID]x[ARGS]{"
    _in_list = False

    def _found(self, marker: str) -> None:
        self._opening, self._state = marker, self._opened

    def _opened(self) -> bool:
        """After the marker: a list, one object, or a name."""
        rest = self._input.lstrip()
        if not rest:
            return False
        if rest[0] in "[{":
            self._in_list = rest[0] == "["
            opening, self._input = self._input[: len(self._input) - len(rest) + self._in_list], rest[self._in_list:]
            self._read(JsonCall(other_keys=True), self._opening + opening)
        elif head := self._HEAD.match(rest):
            self._read(NamedCall(head[1]), "")
            self._in_list, self._input = False, rest[head.end():]
        elif any(self._HEAD.match(rest + self._LONGEST_END[at:]) for at in range(len(self._LONGEST_END))):
            return False  # it may yet become one
        else:
            self._state, opening = self._content, self._opening
            self._opening = ""
            self._say(opening)
        return True

    def _call_done(self) -> None:
        self._state = self._after_item if self._in_list else self._content

    def _after_item(self) -> bool:
        self._input = self._input.lstrip(", \t\r\n")
        if not self._input:
            return False
        if self._input[0] == "{":
            self._read(JsonCall(other_keys=True), "")
        else:
            self._input, self._state = self._input.removeprefix("]"), self._content
        return True

    def _ending(self) -> bool:
        return self._state == self._after_item


class EnforcedStream(MistralStream):
    """An answer that was made to be nothing but calls: `[{"name": ..., "parameters": {...}}, ...]`, or the arguments of
    the one that was asked for by `name`."""

    _markers = ()

    def __init__(self, new_id: Callable[[], str], name: str | None = None):
        super().__init__(new_id)
        self._state = self._opened
        if name is not None:
            self._read(NamedCall(name), "")

    def _content(self) -> bool:
        self._input = ""
        return False

    def _say(self, text: str) -> None:
        """What is no call is the beginning of one that was cut off, and no text for anybody."""


class ToolParser:
    """Takes tool calls out of a model's messages.

    Attributes:
      name: as vLLM calls the format.
      keep_special_tokens: the format's marker is a special token, so that the text has to be made with
        skip_special_tokens=False.
    """

    def __init__(self, name: str, stream: Callable[[Callable[[], str]], ToolStream], new_id: Callable[[], str],
                 keep_special_tokens: bool):
        self.name, self.keep_special_tokens = name, keep_special_tokens
        self._stream, self._new_id = stream, new_id

    def parse(self, text: str) -> ParsedMessage:
        """A whole message. Never fails: what is no call is content."""
        stream = self.stream()
        return joined_message([*stream.feed(text), *stream.finish()])

    def stream(self) -> ToolStream:
        """For a message that arrives in pieces. All its deltas together give what `parse` would."""
        return self._stream(self._new_id)
