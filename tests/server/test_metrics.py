"""/metrics: what Prometheus reads moves with what the server does."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.engine.metrics import Histogram
from jaxserve.server.metrics import ALIASES, COUNTERS, GAUGES, HISTOGRAMS
from tests.server.conftest import Running

Samples = dict[tuple[str, str | None], float]


def scrape(server: Running) -> Samples:
    """(Name, finished_reason or upper bound) -> value, of the engine's metrics."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith("jaxserve:"):
                labels = dict(sample.labels)
                extra = labels.get("finished_reason", labels.get("le"))
                if sample.name.endswith(("cache_config_info", "_bytes")):
                    continue
                assert labels["model_name"] == "tiny" and labels["engine"] == "0", sample
                key = sample.name.removeprefix("jaxserve:"), extra
                assert key not in found
                found[key] = sample.value
    return found


def test_everything_is_exported(tiny: Running) -> None:
    names = {name for name, _ in scrape(tiny)}
    assert set(GAUGES) <= names
    assert {f"{name}_total" for name in COUNTERS} | {"request_success_total"} <= names
    for name in (*HISTOGRAMS, *ALIASES):
        assert {f"{name}_bucket", f"{name}_sum", f"{name}_count"} <= names
    text = tiny.http.get("/metrics").text
    assert 'jaxserve:cache_config_info{block_size="4"' in text and 'num_gpu_blocks="199"' in text
    assert "process_resident_memory_bytes" in text


def test_values_move_with_requests(tiny: Running) -> None:
    before = scrape(tiny)
    tokens = tiny.post("/tokenize", prompt="Numbers 0 1 2 3 4 5 6").json()["count"]
    body: dict[str, Any] = {"prompt": "Numbers 0 1 2 3 4 5 6", "max_tokens": 10, "temperature": 0, "ignore_eos": True,
                            "cache_salt": "metrics"}
    for _ in range(2):
        assert tiny.post("/v1/completions", **body).status_code == 200
    stopped = tiny.post("/v1/completions", **body | {"ignore_eos": False, "logit_bias": {"2": 100}}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert tiny.post("/v1/completions", **body | {"temperature": -1}).status_code == 400
    with tiny.http.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 100}) as answer:
        next(answer.iter_raw())
    tiny.settle()
    after = scrape(tiny)

    def moved(name: str, extra: str | None = None) -> float:
        return after[name, extra] - before[name, extra]

    assert moved("prompt_tokens_total") == 4 * tokens
    assert moved("generation_tokens_total") >= 22
    assert moved("request_success_total", "length") == 2 and moved("request_success_total", "stop") == 1
    assert moved("request_success_total", "abort") == 1
    assert moved("prefix_cache_queries_total") == 4 * tokens and moved("prefix_cache_hits_total") >= tokens - 4
    assert moved("request_prompt_tokens_count") == 3 and moved("request_prompt_tokens_sum") == 3 * tokens
    assert moved("request_generation_tokens_sum") == 21 and moved("request_params_max_tokens_sum") == 30
    assert moved("request_generation_tokens_bucket", "10.0") == 3
    assert moved("request_generation_tokens_bucket", "5.0") == 1
    assert moved("time_to_first_token_seconds_count") == 4
    assert moved("inter_token_latency_seconds_count") >= 18
    for alias, name in ALIASES.items():
        assert after[f"{alias}_count", None] == after[f"{name}_count", None]
    for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds", "request_inference_time_seconds"):
        assert moved(f"{name}_count") == 3 and moved(f"{name}_sum") >= 0
        assert after[f"{name}_bucket", "+Inf"] == after[f"{name}_count", None]
    whole = moved("e2e_request_latency_seconds_sum")
    parts = sum(moved(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert whole == pytest.approx(parts) and whole > 0
    assert moved("iteration_tokens_total_count") == moved("engine_steps_total") > 20
    assert after["num_requests_running", None] == after["num_requests_waiting", None] == 0
    assert after["kv_cache_usage_perc", None] == 0


def test_gauges_while_requests_run(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny.llm._engine.step

    def slow() -> Any:
        time.sleep(0.1)  # 12 s in all
        return step()

    monkeypatch.setattr(tiny.llm._engine, "step", slow)
    body: dict[str, Any] = {"prompt": "fox", "max_tokens": 120, "ignore_eos": True, "stream": True, "n": 6,
                            "temperature": 1.0}
    with tiny.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_raw())
        found = scrape(Running(tiny.url, tiny.llm, httpx.Client(base_url=tiny.url), tiny.ai))
        assert found["num_requests_running", None] == 4 and found["num_requests_waiting", None] == 2
        assert 0 < found["kv_cache_usage_perc", None] < 1
    tiny.settle()


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 100.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2] and histogram.sum == 107.5
