"""Guides: texts of the form pass, others do not, and the end comes when the form is complete."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidInputError
from jaxserve.request import SamplingParams
from jaxserve.structured_outputs import StructuredOutputsParams
from jaxserve.text import Tokenizer
from jaxserve.text.guides import Guides
from tests.tiny import tiny_tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def follows(tokenizer: Tokenizer, text: str, **form: Any) -> bool:
    """Whether every token of the text is allowed in its place, and then the end."""
    guide = Guides(tokenizer, tokenizer.vocab_size + 40, [EOS]).make(StructuredOutputsParams(**form))
    words = np.zeros(-(-(tokenizer.vocab_size + 40) // 32), np.uint32)
    for token_id in [*tokenizer.encode(text, add_special_tokens=False), EOS]:
        guide.fill(words)
        if not words[token_id // 32] >> (token_id % 32) & 1:
            return False
        guide.advance(token_id)
    return True


def test_thousands_of_choices(tokenizer: Tokenizer) -> None:
    choices = [f"z{number}" for number in range(10_000)]
    assert follows(tokenizer, "z9999", choice=choices) and not follows(tokenizer, "z", choice=choices)
    with pytest.raises(InvalidInputError, match="at most"):
        follows(tokenizer, "z", choice=[f"z{number}" for number in range(100_000)])
    with pytest.raises(InvalidInputError, match="at most"):
        follows(tokenizer, "z", regex="b" * 3_000_000)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {
    "type": "integer", "minimum": 0}, "minItems": 1}}, "required": ["name", "ages"], "additionalProperties": False}


@pytest.mark.parametrize(("form", "good", "bad"), [
    ({"json": SCHEMA}, '{"name": "é\\n", "ages": [3, 40]}', '{"name": 3}'),
    ({"json": json.dumps(SCHEMA)}, '{"name":"","ages":[0]}', '{"name": "x", "ages": [-1]}'),
    ({"json": SCHEMA, "disable_any_whitespace": True}, '{"name":"","ages":[0]}', '{"name": "","ages":[0]}'),
    ({"json": True}, '[1, {"a": null}]', "[1,"),
    ({"json_object": True}, '{"a": [true]}', "[true]"),
    ({"regex": r"\d{3}-[a-c]+"}, "123-abc", "12-abc"),
    ({"choice": ["yes", 'n"o', "yes, sure"]}, 'n"o', "no"),
    ({"choice": ["yes", "yes, sure"]}, "yes, sure", "yes, s"),
    ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, "abcb", "a"),
    ({"grammar": 'root ::= "a" ("b" | "c")+'}, "abcb", "a"),
])
def test_forms(tokenizer: Tokenizer, form: dict[str, Any], good: str, bad: str) -> None:
    assert follows(tokenizer, good, **form)
    assert not follows(tokenizer, bad, **form)


def test_copies_go_their_own_ways(tokenizer: Tokenizer) -> None:
    guide = Guides(tokenizer, tokenizer.vocab_size, [EOS]).make(StructuredOutputsParams(choice=["ab", "ac"]))
    words, other = (np.zeros(-(-tokenizer.vocab_size // 32), np.uint32) for _ in range(2))
    copy = guide.copy()
    guide.fill(words)
    for token_id in tokenizer.encode("ab", add_special_tokens=False):
        guide.advance(token_id)
    copy.fill(other)
    assert (words == other).all()
    guide.fill(words)
    assert (words != other).any()


@pytest.mark.parametrize(("form", "said"), [
    ({"json": {"type": "objekt"}}, "structured_outputs.json"),
    ({"json": "{"}, "structured_outputs.json"),
    ({"json": 3}, "structured_outputs.json"),
    ({"regex": "(a"}, "structured_outputs.regex"),
    ({"grammar": "start: nope"}, "structured_outputs.grammar"),
    ({"choice": "yes"}, "structured_outputs.choice"),
    ({"choice": []}, "structured_outputs.choice"),
    ({}, "exactly one of"),
    ({"regex": "a", "choice": ["a"]}, "exactly one of"),
])
def test_bad_forms_are_refused(tokenizer: Tokenizer, form: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        follows(tokenizer, "", **form)
    assert said in str(refused.value)


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"allowed_token_ids": [5]}, {"bad_words": ["x"]}])
def test_what_does_not_go_together(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="nothing with structured_outputs"):
        SamplingParams(structured_outputs={"regex": "a"}, **other)
