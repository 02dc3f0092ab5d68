"""Takes what a model thinks aloud out of its messages: `<think>...</think>` before the answer."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.server.parsers.deltas import (
    ContentDelta,
    Delta,
    ParsedReasoning,
    ReasoningDelta,
    append,
    joined_reasoning,
    overlap,
)

START, END = "<think>", "</think>"


class ReasoningStream:
    """One message. Only a block at its beginning is reasoning; tags after it are text.

    Whitespace next to a tag belongs to the format and is left out.

    Args:
      inside: the block is open already, so that the text begins in it.
    """

    def __init__(self, inside: bool):
        self._inside = inside
        self._state: Callable[[bool], bool] = self._beginning
        self._input = ""  # not consumed
        self._deltas: list[Delta] = []

    def feed(self, delta: str) -> list[Delta]:
        """Takes more text and returns what it makes certain."""
        return self._run(delta, last=False)

    def finish(self) -> list[Delta]:
        """Ends the message and returns the rest. A block that is still open is reasoning to the end."""
        return self._run("", last=True)

    def _run(self, delta: str, last: bool) -> list[Delta]:
        self._input += delta
        while self._input and self._state(last):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _beginning(self, last: bool) -> bool:
        rest = self._input.lstrip()
        if START.startswith(rest) and rest != START and not last:
            return False
        if rest.startswith(START):
            self._input, self._inside = rest.removeprefix(START), True
        self._state = self._opened if self._inside else self._answering
        return True

    def _opened(self, last: bool) -> bool:
        self._input = self._input.lstrip()
        self._state = self._thinking if self._input else self._opened
        return True

    def _thinking(self, last: bool) -> bool:
        thought, end, rest = self._input.partition(END)
        if end:
            self._input, self._state = rest, self._closed
        elif not last:  # the tag may be on its way, and whitespace before it
            thought = thought[: len(thought) - overlap(thought, END)]
        if end or not last:
            thought = thought.rstrip()
        if thought:
            append(self._deltas, ReasoningDelta(thought))
        if not end:
            self._input = self._input[len(thought):]
        return bool(end)

    def _closed(self, last: bool) -> bool:
        self._input = self._input.lstrip()
        self._state = self._answering if self._input else self._closed
        return True

    def _answering(self, last: bool) -> bool:
        append(self._deltas, ContentDelta(self._input))
        self._input = ""
        return False


class ReasoningParser:
    """Takes the reasoning out of a model's messages.

    Args:
      name: as vLLM calls the format.
      inside: whether messages begin inside the block where nobody says otherwise: DeepSeek-R1's do, with a prompt that
        opened it or without.
    """

    def __init__(self, name: str, inside: bool):
        self.name, self._inside = name, inside

    def begins_inside(self, prompt: str) -> bool:
        """Whether a message after this prompt begins inside the block, since many chat templates open it."""
        return self._inside or prompt.rstrip().endswith(START)

    def parse(self, text: str, inside: bool | None = None) -> ParsedReasoning:
        """A whole message.

        Args:
          inside: what `begins_inside` says of its prompt. Default: as is usual for the format.
        """
        stream = self.stream(inside)
        return joined_reasoning([*stream.feed(text), *stream.finish()])

    def stream(self, inside: bool | None = None) -> ReasoningStream:
        """For a message that arrives in pieces. All its deltas together give what `parse` would."""
        return ReasoningStream(self._inside if inside is None else inside)
