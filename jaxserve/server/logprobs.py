"""Log-probabilities from the engine's form to OpenAI's two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.request import Logprob, PositionLogprobs
from jaxserve.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""JSON has no -infinity, which a token that was forced may have."""


class Names:
    """How a token is written: as its text, or, with vLLM's `return_tokens_as_token_ids`, as "token_id:123"."""

    def __init__(self, *, as_ids: bool):
        self._as_ids = as_ids

    def of(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self._as_ids else text or ""


class CompletionLogprobsBuilder:
    """Of one choice of /v1/completions, piece by piece.

    A token's offset is where it begins in the text that is returned; tokens that are not part of it (special ones)
    have the offset of what follows them.

    Args:
      skips_special: whether the text leaves special tokens out.
    """

    def __init__(self, tokenizer: Any, names: Names, *, skips_special: bool):
        self._tokenizer, self._names = tokenizer, names
        self._left_out = tokenizer.all_special_ids if tokenizer is not None and skips_special else frozenset()
        self._offset = 0
        self._found = _empty()

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs | None], text: str) -> None:
        """The echoed prompt. Nothing predicts its first token."""
        texts = [] if self._tokenizer is None else self._tokenizer.token_texts(token_ids, skip_special_tokens=False)
        for index, (token_id, position) in enumerate(zip(token_ids, logprobs, strict=True)):
            own = texts[index] if texts else ""
            if position is not None:
                own = position[token_id].decoded_token or ""
            self._append(token_id, own, position)
            if text.startswith(own, self._offset):  # else it is not in the text, as a BOS
                self._offset += len(own)
        self._offset = len(text)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> CompletionLogprobs:
        """More tokens; returns everything since the last call."""
        for token_id, position in zip(token_ids, logprobs, strict=True):
            text = position[token_id].decoded_token or ""
            self._append(token_id, text, position)
            self._offset += 0 if token_id in self._left_out else len(text)
        found, self._found = self._found, _empty()
        return found

    def _append(self, token_id: int, text: str, position: PositionLogprobs | None) -> None:
        found = self._found
        found.tokens.append(self._names.of(token_id, text))
        found.text_offset.append(self._offset)
        if position is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            return
        found.token_logprobs.append(_finite(position[token_id].logprob))
        tops: dict[str, float] = {}
        for top_id, top in _likeliest_first(position):
            tops.setdefault(self._names.of(top_id, top.decoded_token), _finite(top.logprob))
        found.top_logprobs.append(tops)


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs], num_top: int,
                  names: Names) -> ChatLogprobs:
    """Of some tokens of a chat's answer, with the `num_top` likeliest alternatives of each."""
    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": names.of(token_id, text), "logprob": _finite(logprob.logprob),
                "bytes": list(text.encode("utf-8", "replace"))}

    return ChatLogprobs(content=[
        TokenLogprob(**entry(token_id, position[token_id]),
                     top_logprobs=[TopLogprob(**entry(*top)) for top in _likeliest_first(position)[:num_top]])
        for token_id, position in zip(token_ids, logprobs, strict=True)])


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> PromptLogprobs | None:
    """vLLM's form."""
    if positions is None:
        return None
    return [None if position is None else {
        token_id: PromptLogprob(logprob=_finite(each.logprob), rank=each.rank, decoded_token=each.decoded_token)
        for token_id, each in position.items()} for position in positions]


def _likeliest_first(position: PositionLogprobs) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: item[1].rank or 0)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _empty() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
