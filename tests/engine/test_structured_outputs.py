"""Outputs of a given form from a model that knows nothing of it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidInputError

SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5},
                                           "age": {"type": "integer", "minimum": 0, "maximum": 120}},
          "required": ["name", "age"], "additionalProperties": False}
FORM = {"json": SCHEMA, "disable_any_whitespace": True}


def params(form: Any, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "max_tokens": 100} | more), structured_outputs=form)


def test_forms_among_plain_requests(tiny_llm: LLM) -> None:
    """Drawn and greedy, several of one prompt, more than run at once; the others' tokens are what they are alone."""
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = tiny_llm.generate("The quick", plain, use_tqdm=False)[0].outputs[0].token_ids
    forms = [params(FORM, n=3), plain, params({"regex": r"[0-9]{2,4}-[x-z]"}), plain,
             params(StructuredOutputsParams(choice=["fox", "lazy dog"]), temperature=0), params(FORM, seed=9)]
    answers = tiny_llm.generate(["The quick"] * len(forms), forms, use_tqdm=False)
    assert answers[1].outputs[0].token_ids == answers[3].outputs[0].token_ids == alone
    for output in [*answers[0].outputs, *answers[5].outputs]:
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert set(value) == {"name", "age"} and len(value["name"]) <= 5 and 0 <= value["age"] <= 120
    assert len({output.text for output in answers[0].outputs}) > 1
    assert re.fullmatch(r"[0-9]{2,4}-[x-z]", answers[2].outputs[0].text)
    assert answers[4].outputs[0].text in ("fox", "lazy dog")


def test_cut_off_by_a_limit(tiny_llm: LLM) -> None:
    output = tiny_llm.generate("x", params({"regex": "[a-z]{50,}"}, max_tokens=6), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "length" and re.fullmatch("[a-z]+", output.text)


def test_a_form_that_is_not_understood_is_refused_alone(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match=r"structured_outputs\.regex='\(a'"):
        tiny_llm.generate("x", params({"regex": "(a"}), use_tqdm=False)
    assert tiny_llm.generate("x", params({"choice": ["a"]}), use_tqdm=False)[0].outputs[0].text == "a"


def test_a_form_that_becomes_too_complex_is_an_error(tiny_llm: LLM) -> None:
    """llguidance follows 2,000 rules at a place; after the "z" there are more."""
    grammar = "start: " + " | ".join(f'"z{number}"' for number in range(3000))
    failed, fine = tiny_llm.generate(["a", "a"], [params({"grammar": grammar}), params({"regex": "z"})], use_tqdm=False)
    assert isinstance(failed.error, InvalidInputError) and "items" in str(failed.error)
    assert failed.outputs[0].finish_reason == "abort"
    assert fine.error is None and fine.outputs[0].text == "z"
