"""Keys, limits, other origins."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

from jaxserve.errors import InvalidInputError
from jaxserve.server import connection
from jaxserve.server.settings import ServerSettings
from tests.faults.scripted import Vocabulary
from tests.server.conftest import Running, slowly, wait_for

PROMPT = {"prompt": "a", "max_tokens": 2}


def test_without_the_key_nothing_is_answered(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {}, api_key=("right", "other"), key="right")
    assert server.ai.completions.create(model="tiny", prompt="a", max_tokens=2).choices
    with httpx.Client(base_url=server.url) as client:
        for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/generate",
                     "/start_profile", "/debug/memory", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer"},
                            {"authorization": "right"}, {"authorization": "Basic right"},
                            {"authorization": "Bearer rightx"}, {"authorization": b"Bearer r\xefght"}):
                answer = client.request("GET" if "models" in path else "POST", path, headers=headers)  # type: ignore
                assert answer.status_code == 401, (path, headers)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
        for path in ("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"):
            assert client.get(path).status_code in (200, 404), path
        assert client.get("/v1/models", headers={"authorization": "bearer other"}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        server.ai.with_options(api_key="wrong").models.list()


def test_large_bodies_are_refused(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {}, max_body_bytes=1000)
    large = json.dumps(PROMPT | {"user": "x" * 2000}).encode()

    def in_pieces() -> Any:
        for start in range(0, len(large), 300):
            yield large[start : start + 300]

    for content in (large, in_pieces()):  # with a length announced, and without
        answer = server.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        assert "1000" in answer.json()["error"]["message"]
    assert server.post("/v1/completions", **PROMPT).status_code == 200
    assert server.post("/v1/completions", **PROMPT, user="x" * 900).status_code == 200


@pytest.mark.parametrize("head", [
    b"x-long: " + b"a" * 300_000, b"x-long: " + b"a" * 70_000 + b"\r\n\r\n", b"x-n: 1234567\r\n" * 20_000])
def test_long_headers_are_refused(scripted: Callable[..., Running], head: bytes) -> None:
    server = scripted(Vocabulary([]), {})
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n")
        with suppress(OSError):  # it hangs up meanwhile
            connection.sendall(head)
        assert connection.recv(12) == b"HTTP/1.1 431"
    refused = server.http.get("/version", headers={"x-long": "a" * 70_000})
    assert refused.json()["error"]["code"] == "headers_too_large"
    assert server.http.get("/version", headers={"x-long": "a" * 50_000}).status_code == 200


def test_who_sends_no_request_is_hung_up_on(scripted: Callable[..., Running], monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connection, "RECEIVE_TIMEOUT_S", 0.3)
    server = scripted(Vocabulary([]), {})
    slowly(server.llm, 0.02)
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n"
    for sent in (b"", head, head + b"\r\n", head + b'\r\n{"prompt": "'):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(sent)
            assert client.recv(100) == b""
    long = server.post("/v1/completions", prompt="a", max_tokens=40, ignore_eos=True)
    assert long.status_code == 200 and long.elapsed.total_seconds() > 0.6, "answers may take longer"
    assert server.http.get("/version").status_code == 200, "the connection too"
    assert "unexpected" not in caplog.text


@pytest.mark.parametrize(("setting", "value"), [
    ("api_key", ("",)), ("api_key", ("ä",)), ("api_key", ("a b",)), ("chat_template", "{% if %}"),
    ("otlp_traces_endpoint", "localhost:4318"), ("otlp_traces_endpoint", "http://"),
    ("otlp_traces_endpoint", "http://[x"), ("profile_dir", __file__), ("profile_dir", "/proc/self/x"),
    ("request_timeout", 0), ("metrics_prefix", "a b"), ("served_model_name", ())])
def test_settings_that_cannot_work(setting: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=setting):
        ServerSettings(**({"served_model_name": ("tiny",)} | {setting: value}))


def test_one_client_gets_only_so_many_at_a_time(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {}, {"max_model_len": 6000, "num_blocks": 6000}, api_key=("one", "two"),
                      key="one", max_concurrent_per_client=2)
    slowly(server.llm, 0.002)
    leave = threading.Event()

    def read() -> None:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 5000,
                                                                 "stream": True}) as answer:
            for _ in answer.iter_raw():
                if leave.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_for(lambda: server.llm.snapshot().num_running == 2)
    refused = server.post("/v1/completions", **PROMPT)
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_requests"
    assert refused.headers["retry-after"] == "1"
    assert server.http.get("/v1/models").status_code == 200, "costs the engine nothing"
    other = server.http.post("/v1/completions", json=PROMPT, headers={"authorization": "Bearer two"})
    assert other.status_code == 200
    leave.set()
    for thread in threads:
        thread.join()
    wait_for(lambda: server.post("/v1/completions", **PROMPT).status_code == 200)


def test_other_origins_only_if_asked(scripted: Callable[..., Running]) -> None:
    headers = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for options, allowed in (({}, None), ({"allowed_origins": ("https://page.example",)}, "https://page.example")):
        server = scripted(Vocabulary([]), {}, **options, api_key=("k",), key="k")
        preflight = httpx.options(f"{server.url}/v1/completions", headers=headers)
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert (preflight.status_code == 200) == (allowed is not None)
        answer = server.http.post("/v1/completions", json=PROMPT, headers={"origin": "https://page.example"})
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_request_ids_are_taken_and_returned(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {})
    answer = server.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    again = server.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine-1"})
    assert again.status_code == 200, "ids of callers may come twice"
    made = {server.post("/v1/completions", **PROMPT).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("a b", "x" * 200, '"', "é"):
        headers: Any = {"x-request-id": bad.encode()}
        assert server.http.get("/health", headers=headers).headers["x-request-id"] != bad


def test_what_is_logged_has_the_id_and_no_text(scripted: Callable[..., Running],
                                               caplog: pytest.LogCaptureFixture) -> None:
    server = scripted(Vocabulary(["secret answer"]), {"q": Vocabulary(["secret answer"]).ids("secret answer")})
    with caplog.at_level("INFO"):
        server.http.post("/v1/completions", json={"prompt": "question", "max_tokens": 3, "temperature": 0},
                         headers={"x-request-id": "logged-1"})
        server.post("/v1/completions", prompt="question", temperature=-1)
        wait_for(lambda: len([r for r in caplog.records if r.name == "jaxserve.access"]) == 2)
    first, second = (json.loads(r.message) for r in caplog.records if r.name == "jaxserve.access")
    assert first | {"seconds": 0} == {
        "request_id": "logged-1", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0,
        "model": "tiny", "stream": False, "prompt_tokens": 8, "generated_tokens": 3, "finish_reasons": ["length"]}
    assert second["status"] == 400 and "question" not in caplog.text and "secret" not in caplog.text
