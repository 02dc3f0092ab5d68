"""Beam search against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jaxserve import LLM, BeamSearchParams
from jaxserve.errors import InvalidInputError
from tests.conftest import TINY_OPTIONS

PROMPTS = [[5, 6, 7], list(range(3, 23)), [40, 8, 15, 16]]


@pytest.mark.parametrize("width", [1, 3, 6])
def test_beams_are_transformers_beams(tiny_llm: LLM, tiny_reference: Any, width: int) -> None:
    """Of a fixed length: about when to stop the two differ."""
    params = BeamSearchParams(beam_width=width, max_tokens=7, ignore_eos=True)
    for prompt, output in zip(PROMPTS, tiny_llm.beam_search(PROMPTS, params), strict=True):
        expected = tiny_reference.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=7, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True)
        assert [beam.tokens for beam in output.sequences] == expected.sequences.tolist()
        if width > 1:
            scores = [beam.cum_logprob / 7 for beam in output.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        for beam in output.sequences:
            assert beam.finish_reason == "length" and len(beam.logprobs) == 7 and beam.text
            chosen = zip(beam.logprobs, beam.tokens[len(prompt):], strict=True)
            assert sum(entry[token].logprob for entry, token in chosen) == pytest.approx(beam.cum_logprob, abs=1e-5)


def test_sequences_end_at_an_end_token(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is a token that the best beam has in its middle; without a penalty the shorter sum is the larger."""
    params = BeamSearchParams(beam_width=8, max_tokens=7, length_penalty=0.0)
    end = tiny_llm.beam_search([[5]], params)[0].sequences[0].tokens[4]
    monkeypatch.setattr(tiny_llm._serving.inputs, "_eos_token_ids", frozenset([end]))
    output, = tiny_llm.beam_search([[5]], params)
    ended = [beam for beam in output.sequences if beam.finish_reason == "stop"]
    assert ended and all(beam.tokens[-1] == end and end not in beam.tokens[1:-1] for beam in ended)
    assert all(end not in beam.tokens[1:] for beam in output.sequences if beam not in ended)
    scores = [beam.cum_logprob for beam in output.sequences]
    assert scores == sorted(scores, reverse=True)


def test_beams_share_their_prompt(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        llm.beam_search([list(range(3, 43))], BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True))
        report = llm.memory_report()
    asked = 40 + 4 * sum(40 + step for step in range(1, 6))
    assert report.prefix_queries == asked
    assert report.hit_rate > 0.9 * (1 - 4 / 40)  # but the last block of each, of 4 tokens


@pytest.mark.parametrize(("options", "message"), [
    (dict(beam_width=0), "beam_width=0"), (dict(beam_width=11), "beam_width=11.*1 to 10"),
    (dict(max_tokens=0), "max_tokens=0"), (dict(temperature=0.5), r"temperature=0\.5"),
])
def test_bad_parameters(options, message) -> None:
    with pytest.raises(InvalidInputError, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | options))


def test_beams_end_where_the_context_does(tiny_llm: LLM) -> None:
    """128 positions; the other prompt's beams go on."""
    params = BeamSearchParams(beam_width=2, max_tokens=6, ignore_eos=True)
    short, long = tiny_llm.beam_search([[5] * 10, list(range(3, 90)) + [5] * 38], params)
    assert [len(beam.tokens) for beam in short.sequences] == [16, 16]
    assert [len(beam.tokens) for beam in long.sequences] == [129, 129]
    assert all(beam.finish_reason == "length" for beam in long.sequences)


def test_a_salt_keeps_beams_apart(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **TINY_OPTIONS) as llm:
        prompt, params = list(range(3, 43)), BeamSearchParams(beam_width=1, max_tokens=1)
        for asked, hits in ((prompt, 0), ({"prompt_token_ids": prompt, "cache_salt": "s"}, 0), (prompt, 36)):
            before = llm.memory_report().prefix_hits
            llm.beam_search([asked], params)
            assert llm.memory_report().prefix_hits - before == hits


def test_bad_prompts(tiny_llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(InvalidInputError, match=r"prompts\[1\]"):
        tiny_llm.beam_search([[5], [10**6]], params)
    with pytest.raises(InvalidInputError, match="params=3"):
        tiny_llm.beam_search([[5]], 3)  # type: ignore[arg-type]
