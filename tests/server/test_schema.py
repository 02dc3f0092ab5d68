"""Requests that nobody thought of, made from the served OpenAPI schema: none may end as a 5xx."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.conftest import Running

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/generate")


@pytest.mark.parametrize("num_cases", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_no_generated_request_ends_as_a_server_error(tiny: Running, num_cases: int) -> None:
    """`num_cases` for each operation that takes something, half of them valid by the schema."""
    schema = schemathesis.openapi.from_url(f"{tiny.url}/openapi.json")
    statuses: Counter[int] = Counter()
    for path in PATHS:
        for mode in schemathesis.GenerationMode:
            strategy = schema[path]["POST"].as_strategy(generation_mode=mode)

            @given(case=strategy)
            @settings(max_examples=num_cases // 2, deadline=None, database=None, derandomize=True,
                      phases=[Phase.generate], suppress_health_check=list(HealthCheck))
            def send(case: Any) -> None:
                answer = case.call(timeout=30)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (case.path, case.body, answer.text)

            send()
    start = time.monotonic()
    tiny.settle()
    assert tiny.http.get("/health").status_code == 200 and time.monotonic() - start < 5
    print(dict(statuses))
    assert sum(statuses.values()) >= len(PATHS) * num_cases and {200, 400} <= statuses.keys()
