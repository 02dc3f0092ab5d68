"""POST /v1/embeddings with OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxserve import AsyncLLM
from tests.conftest import TINY_OPTIONS
from tests.server.conftest import Running, wait_for

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
    ({"input": ["a"] * 2049}, "input"), ({"input": 5}, "input"), ({"input": ["a", 5]}, "input"),
    ({"input": [[5], [-1]]}, "input[1]"), ({"input": [[]]}, "input[0]"), ({"input": "\ud800"}, "input"),
    ({"input": "a", "normalize": "so"}, "normalize"), ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"), ({"input": "a", "endianness": "big"}, "endianness"),
    ({"input": "a", "use_activation": False}, "use_activation"),
])
def test_bad_input(tiny: Running, body: dict[str, Any], param: str) -> None:
    answer = tiny.http.post(URL, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_another_model(tiny: Running) -> None:
    answer = tiny.post(URL, input="a", model="other")
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"


def test_many_inputs_come_back_in_order(tiny: Running) -> None:
    """More than a step takes, in token ids and in text; some beside a stream of tokens."""
    body = {"prompt": "fox", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    alone = tiny.post("/v1/completions", **body).json()["choices"][0]["text"]
    inputs = [[5 + index % 300] * (1 + index % 7) for index in range(100)]
    with tiny.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        together = tiny.ai.embeddings.create(model="tiny", input=inputs)
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert alone.endswith("".join(chunk["choices"][0]["text"] for chunk in rest))
    assert [each.index for each in together.data] == list(range(100))
    for index in (0, 6, 37, 99):
        [single] = tiny.ai.embeddings.create(model="tiny", input=inputs[index]).data
        np.testing.assert_allclose(together.data[index].embedding, single.embedding, atol=1e-5)


def test_options(tiny: Running) -> None:
    def embed(**body: Any) -> Any:
        answer = tiny.post(URL, input="fox", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"][0]["embedding"]

    plain = embed()
    for same in ({"dimensions": 32}, {"user": "me"}, {"add_special_tokens": False}, {"pooling": "last"}):
        assert embed(**same) == plain
    assert embed(pooling="mean") != plain and np.linalg.norm(embed(normalize=False)) > 1.1


def test_tokens_are_counted(tiny: Running) -> None:
    def counted() -> float:
        found = re.search(r"jaxserve:prompt_tokens_total\{.*\} (\S+)", tiny.http.get("/metrics").text)
        assert found is not None
        return float(found[1])

    before = counted()
    used = tiny.post(URL, input=["fox", "The quick brown"]).json()["usage"]
    assert counted() - before == used["prompt_tokens"] == used["total_tokens"] > 3


@pytest.mark.parametrize("timeout_s", [0.3, None])
def test_a_deadline_or_a_client_that_leaves_ends_it(
        tiny_folder: Path, start: Callable[..., Running], caplog: pytest.LogCaptureFixture,
        timeout_s: float | None) -> None:
    """Batches that have not begun by then never do; the log has it."""
    running = start(AsyncLLM(str(tiny_folder), **TINY_OPTIONS), request_timeout=timeout_s)
    release = threading.Event()
    running.llm._submit(release.wait)
    inputs = [[5] * 30] * 4  # as many batches
    with caplog.at_level("INFO", "jaxserve.access"):
        if timeout_s is not None:
            late = running.post(URL, input=inputs)
            assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        else:
            with httpx.Client(base_url=running.url, timeout=0.3) as client, pytest.raises(httpx.ReadTimeout):
                client.post(URL, json={"input": inputs})
        wait_for(lambda: any(record.name == "jaxserve.access" for record in caplog.records))
    [logged] = [json.loads(record.message) for record in caplog.records if record.name == "jaxserve.access"]
    assert (logged["status"], logged["prompt_tokens"], logged["model"]) == (504 if timeout_s else 499, 120, "tiny")
    release.set()
    asyncio.run(running.llm._embeddings.run(lambda: None))  # after the turn that was under way
    assert running.llm.snapshot().num_prompt_tokens <= 30, "of the first batch at most"
    running.settle()
