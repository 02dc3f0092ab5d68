"""Guessing a sequence's next tokens by looking its last ones up in itself ("prompt lookup", Saxena 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.errors import InvalidInputError
from jaxserve.mappings import from_mapping
from jaxserve.request import Request


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's `speculative_config`, of which there is the method "ngram".

    Attributes:
      num_speculative_tokens: most tokens that are guessed for a sequence and a step.
      prompt_lookup_min, prompt_lookup_max: how many of the last tokens must be found again; the longest find counts.
    """

    method: str = "ngram"
    num_speculative_tokens: int = 4
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise InvalidInputError("speculative_config.method", self.method, '"ngram"')
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInputError(f"speculative_config.{name}", value, "an integer of at least 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidInputError("speculative_config.prompt_lookup_min", self.prompt_lookup_min,
                                    f"at most prompt_lookup_max={self.prompt_lookup_max}")

    @classmethod
    def of(cls, value: Any) -> SpeculativeConfig | None:
        """From what a user gave: one of these, a mapping of its attributes, or None.

        Raises:
          InvalidInputError: it is none of these, or has what there is not.
        """
        return from_mapping(cls, "speculative_config", value)


class NgramDrafter:
    """Proposes tokens for requests.

    A guess is checked by the model itself: its tokens are computed in one step, a row each, and every row draws what
    it would draw if the guess before it were the sequence. Rows count up to the first whose draw is not the next
    guess. So each token is drawn from the model's own distribution given the tokens before it: this is rejection
    sampling (Leviathan et al. 2023, arXiv:2211.17192) for a guess without a probability of its own, and since the draw
    of a position depends on nothing but seed and position, the tokens are those of a run without guesses.
    """

    def __init__(self, config: SpeculativeConfig):
        self._config = config
        self._tokens: dict[Request, tuple[np.ndarray, int]] = {}

    def propose(self, request: Request, most: int) -> list[int]:
        """At most so many tokens that may follow its known ones."""
        config, tokens = self._config, self._known(request)
        return look_up(tokens, config.prompt_lookup_min, config.prompt_lookup_max,
                       min(most, config.num_speculative_tokens))

    def forget(self, request: Request) -> None:
        self._tokens.pop(request, None)

    def _known(self, request: Request) -> np.ndarray:
        """Its tokens, in an array that is kept and only ever added to."""
        kept, filled = self._tokens.get(request) or (np.zeros(request.max_total_tokens, np.int32), 0)
        size = request.num_tokens
        kept[filled:size] = request.known_tokens(filled, size)
        self._tokens[request] = kept, size
        return kept[:size]


def look_up(tokens: np.ndarray, least: int, longest: int, count: int) -> list[int]:
    """At most `count` tokens that followed when the last ones, `longest` to `least` of them, came before.

    The most recent place with `count` tokens after it is taken, or else the earliest place.
    """
    if count < 1:
        return []
    for size in range(min(longest, len(tokens) - 1), least - 1, -1):
        last = tokens[-size:]
        starts = np.flatnonzero(tokens[:-size] == last[0])
        for offset in range(1, size):
            starts = starts[tokens[starts + offset] == last[offset]]
        if len(starts):
            whole = starts[starts + size + count <= len(tokens)]
            after = int(whole[-1] if len(whole) else starts[0]) + size
            return tokens[after : after + count].tolist()
    return []
