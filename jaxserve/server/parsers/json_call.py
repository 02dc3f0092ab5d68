"""Reads one tool call written as JSON, a character at a time."""

from __future__ import annotations

import json
from typing import Literal, Protocol

BLANK = " \t\r\n"
ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """Finds the end of a JSON value that begins with the first character pushed.

    Only strings and brackets are followed. What stands between them is not checked, so that arguments can be passed on
    while they arrive.

    Attributes:
      done: the value is complete. A number or a word never is: what comes after it ends it.
      quoted: inside a string.
    """

    def __init__(self) -> None:
        self.done = self.quoted = False
        self._escaped = False
        self._depth = 0

    def push(self, char: str) -> None:
        if self.quoted:
            self.quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            self.done = not self.quoted and not self._depth
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


class Call(Protocol):
    """A call that is being read.

    Attributes:
      name: None until it is known.
      done: nothing more belongs to the call.
    """

    @property
    def name(self) -> str | None: ...

    @property
    def done(self) -> bool: ...

    def push(self, char: str) -> bool:
        """Takes a character. False: it cannot stand here, and the call ends before it."""
        ...

    def take(self) -> str:
        """The text of the arguments since the last `take`; "" as long as the name is not known."""
        ...

    def held(self) -> str:
        """What was read and is not part of the arguments: the call's head until there is something to take, then
        what follows the arguments."""
        ...


class NamedCall:
    """The arguments of a call whose name is known. A `Call`."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self._value = JsonValue()
        self._arguments: list[str] = []  # to be taken

    @property
    def done(self) -> bool:
        return self._value.done

    def push(self, char: str) -> bool:
        self._value.push(char)
        self._arguments.append(char)
        return True

    def take(self) -> str:
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def held(self) -> str:
        return ""


class JsonCall:
    """`{"name": "f", "arguments": {...}}`: the members in any order, "parameters" for "arguments" too. A `Call`.

    Arguments given as a string that holds a JSON object (as in OpenAI's own format) count as that object.

    Args:
      other_keys: whether there may be members besides these, "id" and "type". They are skipped.
      never: characters that end the call wherever they stand outside a string.
    """

    def __init__(self, *, other_keys: bool, never: str = "") -> None:
        self.name: str | None = None
        self.done = False
        self._keys = None if other_keys else {"name", "arguments", "id", "type"}
        self._never = never
        self._expected: Literal["{", "key", ":", "value", ","] = "{"
        self._value: JsonValue | None = None  # the key or value that is being read
        self._text: list[str] = []  # its characters
        self._key = ""
        self._seen: set[str] = set()
        self._arguments: list[str] = []  # to be taken
        self._started = False  # name and beginning of the arguments are known
        self._held: list[str] = []

    def take(self) -> str:
        if not self._started:
            return ""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def held(self) -> str:
        return "".join(self._held)

    def push(self, char: str) -> bool:
        if char in self._never and not (self._value and self._value.quoted):
            return False
        before = len(self._arguments)
        if not self._advance(char):
            return False
        if not self._started and self.name is not None and self._arguments:
            self._started = True
            self._held.clear()
        elif not self._started or len(self._arguments) == before:
            self._held.append(char)
        return True

    def _advance(self, char: str) -> bool:
        if self._value is not None:
            if self._text[0] in '"{[' or char not in BLANK + ",}]":
                return self._extend(char)
            if not self._end():
                return False
        if char in BLANK:
            return True
        if self._expected in ("key", "value"):
            self._value, self._text = JsonValue(), []
            possible = char == '"' if self._expected == "key" else self._key != "arguments" or char in '"{'
            return possible and self._extend(char)
        if self._expected == "," and char == "}":
            self.done = self._started
            return self.done
        if char != self._expected:
            return False
        self._expected = "value" if char == ":" else "key"
        return True

    def _extend(self, char: str) -> bool:
        assert self._value is not None
        self._value.push(char)
        self._text.append(char)
        if self._expected == "value" and self._key == "arguments" and self._text[0] == "{":
            self._arguments.append(char)
        return self._end() if self._value.done else True

    def _end(self) -> bool:
        """The key or value is complete. False: it cannot be here."""
        text, self._value = "".join(self._text), None
        try:
            if self._expected == "value":
                self._expected = ","
                return self._end_of_value(text)
            self._expected = ":"
            self._key = "arguments" if (key := _string(text)) in ARGUMENTS else key
        except ValueError:
            return False
        new = self._key not in self._seen
        self._seen.add(self._key)
        return new and (self._keys is None or self._key in self._keys)

    def _end_of_value(self, text: str) -> bool:
        if self._key == "name":
            self.name = _string(text) if text[0] == '"' else None
            return bool(self.name)
        if self._key == "arguments" and text[0] == '"':
            inner = _string(text).strip()
            self._arguments.append(inner)
            return inner[:1] == "{" and inner[-1:] == "}"
        return True


def _string(literal: str) -> str:
    """The text of a JSON string.

    Raises:
      ValueError: it is none, or its text could not be sent on.
    """
    text: str = json.loads(literal, strict=False)
    text.encode()  # refuses half of a surrogate pair
    return text
