"""Embeddings against transformers' hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jaxserve import LLM
from jaxserve.errors import InvalidInputError, PromptTooLongError

PROMPTS = [[5, 6, 7], list(range(3, 20)), [9], list(range(40, 72))]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_as_transformers(tiny_llm: LLM, tiny_reference: Any, pooling: Any) -> None:
    found = tiny_llm.embed(PROMPTS, pooling=pooling, normalize=False)
    unit = tiny_llm.embed(PROMPTS, pooling=pooling)
    for prompt, vector, of_length_1 in zip(PROMPTS, found, unit, strict=True):
        with torch.no_grad():
            states = tiny_reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].numpy()
        expected = states[-1] if pooling == "last" else states.mean(0)
        np.testing.assert_allclose(vector, expected, atol=1e-4)
        np.testing.assert_allclose(of_length_1, expected / np.linalg.norm(expected), atol=1e-4)


def test_what_is_wrong_is_said(tiny_llm: LLM) -> None:
    with pytest.raises(InvalidInputError, match="pooling='first'"):
        tiny_llm.embed([5], pooling="first")  # type: ignore[arg-type]
    with pytest.raises(PromptTooLongError, match=r"prompts\[1\]='33 tokens'"):
        tiny_llm.embed([[5], [6] * 33])
    with pytest.raises(InvalidInputError, match="at least one token"):
        tiny_llm.embed([[5], []])
