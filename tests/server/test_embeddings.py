"""POST /v1/embeddings with OpenAI's client."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Running

URL = "/v1/embeddings"


def test_both_encodings_and_kinds_of_input(tiny: Running) -> None:
    texts = ["fox", "The quick brown fox"]
    ids = [tiny.llm.get_tokenizer().encode(text) for text in texts]
    answer = tiny.ai.embeddings.create(model="tiny", input=texts)  # asks for base64 by itself
    plain = tiny.post(URL, input=ids).json()
    vectors = [np.array(each.embedding) for each in answer.data]
    assert [each["index"] for each in plain["data"]] == [0, 1]
    assert answer.usage.prompt_tokens == plain["usage"]["prompt_tokens"] == sum(map(len, ids))
    for vector, each in zip(vectors, plain["data"], strict=True):
        assert vector.shape == (32,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(vector, each["embedding"], atol=1e-6)
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01
    packed = tiny.post(URL, input="fox", encoding_format="base64", pooling="mean", normalize=False).json()["data"][0]
    mean = tiny.post(URL, input="fox", pooling="mean", normalize=False).json()["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed["embedding"]), "<f4"), mean, atol=1e-6)


@pytest.mark.parametrize(("body", "param"), [
    ({}, "input"), ({"input": ""}, "input"), ({"input": []}, "input"), ({"input": ["a", ""]}, "input[1]"),
    ({"input": [10**6]}, "input"), ({"input": "a " * 200}, "input"), ({"input": ["a"], "dimensions": 8}, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"), ({"input": "a", "pooling": "first"}, "pooling"),
    ({"input": ["a"] * 2049}, "input"),
])
def test_bad_input(tiny: Running, body: dict[str, Any], param: str) -> None:
    answer = tiny.post(URL, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
