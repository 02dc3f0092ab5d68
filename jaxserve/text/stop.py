"""Stop strings over a stream of text: what may be shown, what must wait, and where the output ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Holds back text that could still become a stop string and cuts the output at the first one.

    The stop that is complete first, counted in characters, ends the output; of two that are complete at the same
    character, the longer. So the result does not depend on how the text was cut into tokens.

    As in vLLM, no stop applies to the first `min_tokens` tokens: one that is complete by then is plain text. One
    that begins in them and is completed by a later token does apply.

    Args:
      stops: non-empty texts.
      include_stop_str_in_output: keep the matched text, whole, at the end of the output instead of cutting it off.
      min_tokens: how many tokens, that is calls of `feed`, pass before stops apply.

    Attributes:
      matched: the stop string that ended the output, None so far.
    """

    __slots__ = ("_automata", "_first_chars", "_held", "_immune", "_include", "_plain", "_states", "_tokens_before",
                 "matched")

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False, min_tokens: int = 0):
        self.matched: str | None = None
        self._include = include_stop_str_in_output
        self._tokens_before = min_tokens
        self._automata = [(stop, _failure_links(stop)) for stop in dict.fromkeys(stops)]
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(self._automata)  # per stop: how many of its characters the text so far ends with
        self._held = ""
        self._immune = 0  # so many characters still to come belong to the first min_tokens tokens
        self._plain = True  # nothing is held, no special rule applies

    def feed(self, delta: str, pending: str = "") -> str:
        """Takes the text of one more token and returns the text that may be released now.

        Args:
          delta: text that the detokenizer gave for the token; may be empty.
          pending: complete text that the detokenizer still withholds (`IncrementalDetokenizer.pending`). If it
            completes a stop the output ends at once, one token earlier than if it were waited for.
        """
        if self._plain and not pending and not self._tokens_before and self._first_chars.isdisjoint(delta):
            return delta  # nearly always
        if self.matched is not None:
            return ""
        if self._tokens_before:
            self._tokens_before -= 1
            released = self._consume(delta, immune=len(delta))
            self._immune = len(pending)
            self._plain = self._plain and not pending
            return released
        released = self._consume(delta, self._immune)
        self._immune = max(0, self._immune - len(delta))
        self._plain = not self._held and not self._immune and self.matched is None
        if pending and self.matched is None:
            released += self._try_pending(pending)
        return released

    def finish(self, tail: str = "") -> str:
        """Ends the output: releases what was withheld, and `tail`, the detokenizer's last text, unless a stop matches.

        Nothing comes after a match, whether it was found earlier or is found in `tail`.
        """
        if self.matched is not None:
            return ""
        released = self._consume(tail, len(tail) if self._tokens_before else self._immune)
        if self.matched is None:
            released, self._held = released + self._held, ""
        self._states = [0] * len(self._states)
        return released

    def _consume(self, text: str, immune: int) -> str:
        """Runs `text` through all stops; one complete within its first `immune` characters does not count."""
        found = self._advance(text, immune)
        total = self._held + text
        if found is not None:
            end, stop = found
            end += len(self._held)
            self.matched, self._held, self._plain = stop, "", False
            return total[: end if self._include else end - len(stop)]
        split = len(total) - max(self._states, default=0)
        self._held = total[split:]
        self._plain = not self._held
        return total[:split]

    def _try_pending(self, pending: str) -> str:
        """Looks ahead: the pending text counts only if a stop is complete in it, since it may yet change."""
        states = self._states.copy()
        if self._advance(pending, self._immune) is None:
            self._states = states
            return ""
        self._states = states
        return self._consume(pending, self._immune)

    def _advance(self, text: str, immune: int) -> tuple[int, str] | None:
        """Knuth-Morris-Pratt for each stop. Returns (end in `text`, stop) of the match that counts, if any."""
        best: tuple[int, str] | None = None
        for index, (stop, links) in enumerate(self._automata):
            state, position = self._states[index], 0
            while position < len(text):
                if not state:  # skip to where the stop may begin
                    position = text.find(stop[0], position)
                    if position < 0:
                        break
                char = text[position]
                position += 1
                while state and stop[state] != char:
                    state = links[state - 1]
                if stop[state] == char:
                    state += 1
                if state < len(stop):
                    continue
                if position > immune:
                    if best is None or position < best[0] or len(stop) > len(best[1]):
                        best, text = (position, stop), text[:position]
                    state = 0
                    break
                state = links[state - 1]
            self._states[index] = state
        return best


def _failure_links(stop: str) -> list[int]:
    """For each prefix of `stop` the length of its longest proper suffix that is also a prefix."""
    links = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = links[length - 1]
        if stop[index] == stop[length]:
            length += 1
        links[index] = length
    return links
