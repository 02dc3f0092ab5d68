"""Which tokens may come next if an output is to have a given form: llguidance's answers, as bits for the sampler."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.errors import InvalidInputError
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text.tokenizer import Tokenizer

MAX_CHARS = 1 << 18
"""Of a form: to understand one takes a while, in which little else can go on."""
_SPACE = r"[ \t\r\n]{1,40}"
"""Between JSON's tokens. Without a limit a small model may write line breaks until its tokens are used up."""


class Guide:
    """How far one output has come in its form.

    When the form is complete, or cannot be followed further, only the tokens that end a text are left.

    Args:
      field, value: the form as it was asked for.
    """

    def __init__(self, matcher: LLMatcher, eos_token_ids: Iterable[int], field: str, value: Any):
        self._matcher, self._field, self._value = matcher, field, value
        self._eos_token_ids = sorted(eos_token_ids)

    @property
    def failure(self) -> InvalidInputError | None:
        """Why the form was not followed to its end, although the text was: it has become too complex."""
        if not self._matcher.is_error():
            return None
        return _not_understood(self._field, self._value, self._matcher.get_error())

    def advance(self, token_id: int) -> None:
        """The output goes on with this token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def fill(self, words: np.ndarray) -> None:
        """Sets the bit of each token that may come next, and no other.

        Args:
          words: uint32 [W], contiguous; token i is bit i % 32 of word i // 32.
        """
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_stopped() or not words.any():
            words[:] = 0
            for token_id in self._eos_token_ids:
                words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self._eos_token_ids, self._field, self._value)


class Guides:
    """Makes guides for a tokenizer's texts.

    Args:
      vocab_size: the model's, which may be larger than the tokenizer's.
      eos_token_ids: what ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        """A quarter of a second for 49,000 tokens, so only when somebody asks for a form."""
        return LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab_size,
                           eos_token=self._eos_token_ids or None)

    def make(self, params: StructuredOutputsParams) -> Guide:
        """
        Raises:
          InvalidInputError: the form cannot be understood, or not followed.
        """
        field = f"structured_outputs.{params.form}"
        value = getattr(params, params.form)
        try:
            if len(grammar := _grammar(params)) > MAX_CHARS:
                raise InvalidInputError(field, f"{len(grammar)} characters", f"at most {MAX_CHARS} characters")
            matcher = LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        except InvalidInputError:
            raise
        except (ValueError, RecursionError) as error:
            raise _not_understood(field, value, str(error)) from error
        if matcher.is_error():
            raise _not_understood(field, value, matcher.get_error())
        if not matcher.is_accepting() and self._has_no_beginning(matcher):
            raise InvalidInputError(field, value, "a form that some text has")
        return Guide(matcher, self._eos_token_ids, field, value)

    def _has_no_beginning(self, matcher: LLMatcher) -> bool:
        """As of a schema that consists of itself."""
        words = np.zeros(-(-self._vocab_size // 32), np.uint32)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return matcher.is_stopped() or not words.any()


def _not_understood(field: str, value: Any, why: str) -> InvalidInputError:
    return InvalidInputError(field, value, f"what llguidance understands ({' '.join(why.split())[:300]})")


def _grammar(params: StructuredOutputsParams) -> str:
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # JSON's escapes are Lark's too. As one terminal, since the parser allows only so many rules at a place.
        return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, params.choice)))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(_lark(params.grammar))
    schema: Any = {"type": "object"} if params.json_object else params.json
    if schema is True:
        schema = {}
    if params.disable_additional_properties:
        schema = {"additionalProperties": False} | schema
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or _SPACE
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def _lark(grammar: str) -> str:
    """Of a grammar in Lark's or in llama.cpp's syntax (GBNF)."""
    try:
        return any_to_lark(grammar)
    except Exception as error:  # it knows no narrower type for what is wrong with a grammar
        raise ValueError(str(error)) from error
