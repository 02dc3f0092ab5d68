"""Readiness, failure, traces, profiles."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jaxserve import AsyncLLM
from jaxserve.errors import InvalidInputError
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tracing import Tracing
from tests.conftest import TINY_OPTIONS
from tests.faults.scripted import Vocabulary, scripted_async_llm
from tests.server.conftest import Running, slowly, wait_for


def test_health_waits_for_the_warm_up(start: Callable[..., Running]) -> None:
    llm = scripted_async_llm(Vocabulary([]), {})
    runner: Any = llm._engine.runner
    release = threading.Event()
    runner.warm_up = lambda: (release.wait(), 1.5)[1]
    server = start(llm, warmup=True)
    not_yet = server.http.get("/health")
    assert not_yet.status_code == 503 and "warming up" in not_yet.json()["error"]["message"]
    early: list[httpx.Response] = []
    asks = threading.Thread(target=lambda: early.append(server.post("/v1/completions", prompt="a", max_tokens=1)))
    asks.start()
    release.set()
    wait_for(lambda: server.http.get("/health").status_code == 200)
    asks.join()
    assert early[0].status_code == 200, "requests wait for the warm-up"


def test_a_failed_warm_up_is_told(start: Callable[..., Running]) -> None:
    llm = scripted_async_llm(Vocabulary([]), {})
    runner: Any = llm._engine.runner

    def fail() -> float:
        raise RuntimeError("no room")

    runner.warm_up = fail
    server = start(llm, warmup=True)
    wait_for(lambda: "no room" in server.http.get("/health").text)
    assert server.http.get("/health").status_code == 503


def test_a_failing_engine_is_told_to_all(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {}, {"max_model_len": 6000, "num_blocks": 6000})
    slowly(server.llm, 0.002)
    assert server.http.get("/health").status_code == 200
    found: dict[str, httpx.Response] = {}

    def ask(stream: bool) -> None:
        found[str(stream)] = server.post("/v1/completions", prompt="a", max_tokens=5000, stream=stream)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.llm._engine.stats.num_generated_tokens > 10)
    runner: Any = server.llm._engine.runner

    def burn(plan: Any) -> Any:
        raise RuntimeError("the device is on fire")

    runner.dispatch = burn
    for thread in threads:
        thread.join()
    assert found["False"].status_code == 503 and "on fire" in found["False"].json()["error"]["message"]
    *_, error, done, _ = found["True"].text.split("\n\n")
    assert found["True"].status_code == 200 and '"code":"engine_dead"' in error and done == "data: [DONE]"
    assert server.http.get("/health").status_code == 503
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
        later = server.post("/v1/completions", **body)
        assert later.status_code == 503 and later.json()["error"]["type"] == "server_error"


def test_what_nobody_thought_of_is_a_500_in_the_same_form(scripted: Callable[..., Running],
                                                         caplog: pytest.LogCaptureFixture) -> None:
    server = scripted(Vocabulary([]), {})
    broken: Any = server.llm
    broken.encode = None
    answer = server.post("/tokenize", prompt="a")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "NoneType" not in answer.text and "NoneType" in caplog.text and answer.headers["x-request-id"]
    assert server.http.get("/health").status_code == 200


def test_spans(start: Callable[..., Running]) -> None:
    exporter = InMemorySpanExporter()
    vocabulary = Vocabulary(["x"])
    llm = scripted_async_llm(vocabulary, {"a": [*vocabulary.ids("x"), vocabulary.eos]})
    tracing = Tracing(exporter=exporter)
    server = start(llm, tracing=tracing)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    server.http.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": parent, "x-request-id": "t"})
    server.post("/v1/completions", prompt="a", stream=True)
    server.post("/v1/completions", prompt="a", temperature=-1)
    server.http.get("/health")
    tracing._provider.force_flush()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["llm_request"] * 3
    first = spans[0]
    assert first.context is not None and first.parent is not None and first.attributes is not None
    assert f"{first.context.trace_id:032x}" == parent.split("-")[1]
    assert f"{first.parent.span_id:016x}" == parent.split("-")[2]
    assert first.attributes["gen_ai.request.id"] == "t" and first.attributes["gen_ai.usage.prompt_tokens"] == 1
    assert first.attributes["gen_ai.usage.completion_tokens"] == 2
    assert first.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    times = {name: first.attributes[f"gen_ai.latency.{name}"] for name in
             ("time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode", "e2e")}
    assert all(isinstance(value, float) and value >= 0 for value in times.values())
    assert spans[1].attributes is not None and spans[1].parent is None
    assert spans[1].attributes["gen_ai.usage.completion_tokens"] == 2
    assert spans[2].attributes is not None and spans[2].attributes["http.response.status_code"] == 400


def test_profiles_are_recorded_where_the_operator_says(tiny_folder: Path, tmp_path: Path,
                                                       start: Callable[..., Running], tiny: Running) -> None:
    assert tiny.post("/start_profile").status_code == 400
    server = start(AsyncLLM(str(tiny_folder), **TINY_OPTIONS), profile_dir=str(tmp_path / "out"))
    assert server.post("/stop_profile").status_code == 400
    assert server.post("/start_profile").status_code == 200
    assert server.post("/start_profile").status_code == 400, "one is running"
    assert server.post("/v1/completions", prompt="fox", max_tokens=2).status_code == 200
    assert server.post("/stop_profile").status_code == 200
    assert list((tmp_path / "out").rglob("*.xplane.pb"))
    # One that can't be written is lost, and the next one works.
    shutil.rmtree(tmp_path / "out")
    assert server.post("/start_profile").status_code == 200
    (tmp_path / "out").write_text("in the way")
    lost = server.post("/stop_profile")
    assert lost.status_code == 500 and lost.json()["error"]["type"] == "server_error"
    assert "the recording is lost" in lost.json()["error"]["message"]
    (tmp_path / "out").unlink()
    assert server.post("/start_profile").status_code == 200 and server.post("/stop_profile").status_code == 200


def test_debug_endpoints_only_if_asked(tiny: Running, scripted: Callable[..., Running]) -> None:
    report = tiny.http.get("/debug/memory").json()
    assert report["num_blocks"] == 199 and report["num_used"] == 0 and 0 <= report["hit_rate"] <= 1
    assert scripted(Vocabulary([]), {}).http.get("/debug/memory").status_code == 404


def test_the_chat_page_and_docs(tiny: Running) -> None:
    page = tiny.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "<html" in page.text
    assert tiny.http.get("/app.js").headers["content-type"].startswith("text/javascript")
    assert tiny.http.get("/style.css").headers["content-type"].startswith("text/css")
    assert tiny.http.get("/docs").status_code == 200 and tiny.http.get("/version").json()["version"]
    paths = tiny.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"} <= set(paths)


@pytest.mark.parametrize("settings, field", [
    ({"served_model_name": ()}, "served_model_name"), ({"api_key": ("",)}, "api_key"),
    ({"metrics_prefix": "a-b"}, "metrics_prefix"), ({"max_body_bytes": 0}, "max_body_bytes"),
    ({"request_timeout": -1}, "request_timeout"), ({"tool_call_parser": "x"}, "tool_call_parser"),
    ({"reasoning_parser": "x"}, "reasoning_parser"), ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice")])
def test_settings_are_checked(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ServerSettings(**({"served_model_name": ("m",)} | settings))
    assert refused.value.field == field
