"""Log-probabilities from the device's arrays to the caller's dictionaries, made only when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.request import Logprob, PositionLogprobs
from jaxserve.text import IncrementalDetokenizer, Tokenizer

HostLogprobs = tuple[list[float], list[int], np.ndarray, np.ndarray]
"""As `sampling.logprobs.Logprobs`: log-probability [R], rank [R], likeliest ids [R, MAX], their values [R, MAX]. The
large ones stay arrays: they are kept until somebody looks at them, which may be never."""


class HostCopy:
    """A step's log-probability arrays, brought to the host when the first request asks for them."""

    def __init__(self, arrays: Sequence[Any] | None):
        self._arrays = arrays
        self._copy: HostLogprobs | None = None

    def get(self) -> HostLogprobs:
        if self._copy is None:
            assert self._arrays is not None
            logprobs, ranks, top_ids, top_logprobs = (np.asarray(array) for array in self._arrays)
            self._copy = logprobs.tolist(), ranks.tolist(), top_ids, top_logprobs
        return self._copy


class SampledLogprobs:
    """Of one completion's tokens. A step's arrays are kept as they are until an output needs them as dictionaries.

    The texts of the chosen tokens joined are the text of the output (special tokens included): the bytes of a split
    character all count for its last token. Alternatives have the text they have on their own.
    """

    def __init__(self, num_top: int, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]):
        self._num_top, self._tokenizer = num_top, tokenizer
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(
            tokenizer, skip_special_tokens=False, prompt_token_ids=prompt_token_ids)
        self._pending: list[tuple[int, int, HostLogprobs]] = []
        self._positions: list[PositionLogprobs] = []
        self.cumulative = 0.0

    def add(self, token_id: int, row: int, arrays: HostLogprobs) -> None:
        """One more token, described by this row of the step's arrays."""
        self._pending.append((token_id, row, arrays))
        self.cumulative += arrays[0][row]

    def since(self, first: int, *, is_end: bool) -> list[PositionLogprobs]:
        """Of tokens first, first + 1, ...; at the end the last one's text has what the detokenizer still withheld."""
        for token_id, row, arrays in self._pending:
            text = None if self._detokenizer is None else self._detokenizer.append(token_id)
            self._positions.append(_position(token_id, text, row, arrays, self._num_top, self._tokenizer))
        if is_end and self._pending and self._detokenizer is not None:
            last = self._positions[-1][self._pending[-1][0]]
            last.decoded_token = (last.decoded_token or "") + self._detokenizer.finish()
        self._pending.clear()
        return self._positions[first:]


class PromptLogprobs:
    """Of one prompt's tokens, which may come in several chunks, and again after a preemption. Texts as above."""

    def __init__(self, num_top: int, prompt_token_ids: list[int], tokenizer: Tokenizer | None):
        self._num_top, self._tokenizer, self._token_ids = num_top, tokenizer, prompt_token_ids
        self._texts: Sequence[str | None] = [None] * len(prompt_token_ids)
        if tokenizer is not None:
            # Special tokens aside the texts are the prompt's: a BOS must not count as something to put a space after.
            texts = tokenizer.token_texts(prompt_token_ids)
            self._texts = [tokenizer.token_text(token_id) if token_id in tokenizer.all_special_ids else text
                           for token_id, text in zip(prompt_token_ids, texts, strict=True)]
        self.positions: list[PositionLogprobs | None] = [None]  # nothing predicts the first token

    @property
    def is_complete(self) -> bool:
        return len(self.positions) == len(self._token_ids)

    def add(self, start: int, num_tokens: int, row: int, arrays: HostLogprobs) -> None:
        """A chunk: the token at position start + i is row row + i and predicts the one after it."""
        for offset in range(num_tokens):
            position = start + offset + 1
            if position == len(self.positions) and position < len(self._token_ids):
                token_id = self._token_ids[position]
                text = self._texts[position]
                self.positions.append(_position(token_id, text, row + offset, arrays, self._num_top, self._tokenizer))


def _position(token_id: int, text: str | None, row: int, arrays: HostLogprobs, num_top: int,
              tokenizer: Tokenizer | None) -> PositionLogprobs:
    logprobs, ranks, top_ids, top_logprobs = arrays
    found = {token_id: Logprob(logprobs[row], ranks[row], text)}
    if num_top:
        text_of = None if tokenizer is None else tokenizer.token_text
        likeliest = zip(top_ids[row, :num_top].tolist(), top_logprobs[row, :num_top].tolist(), strict=True)
        for rank, (top_id, logprob) in enumerate(likeliest, start=1):
            if top_id != token_id:
                found[top_id] = Logprob(logprob, rank, text_of and text_of(top_id))
    return found
