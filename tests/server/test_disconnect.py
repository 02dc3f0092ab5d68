"""Clients that leave: their requests end, and everything that they held is free again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.faults.scripted import Vocabulary
from tests.server.conftest import Running, slowly, wait_for

ENDLESS = {"temperature": 0, "max_tokens": 5000, "ignore_eos": True}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ENGINE = {"max_model_len": 6000, "num_blocks": 6000}


def leave(server: Running, path: str, body: dict[str, Any], *, after: int) -> None:
    """Reads so many pieces of a stream and closes the socket."""
    with httpx.Client(base_url=server.url) as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        for number, _ in enumerate(answer.iter_raw()):
            if number == after:
                break


@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT),
                                        ("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": ["a", "ab"]})])
def test_streams_that_nobody_reads_end(scripted: Callable[..., Running], path: str, body: dict[str, Any]) -> None:
    server = scripted(Vocabulary([]), {}, ENGINE | {"max_num_seqs": 2}, chat_template=TEMPLATE)
    slowly(server.llm, 0.002)
    for _ in range(2):
        leave(server, path, body | ENDLESS | {"stream": True}, after=1)
    server.settle()
    assert server.llm._engine.stats.num_aborted >= 2
    start = time.monotonic()
    assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
    assert time.monotonic() - start < 2


def test_whole_answers_that_nobody_waits_for_end(scripted: Callable[..., Running]) -> None:
    """One that runs, one that waits, several prompts at once."""
    server = scripted(Vocabulary([]), {}, ENGINE | {"max_num_seqs": 1}, chat_template=TEMPLATE)
    slowly(server.llm, 0.002)
    with httpx.Client(base_url=server.url, timeout=0.3) as client:
        for path, body in (("/v1/completions", {"prompt": ["a", "b", "c"]}), ("/v1/chat/completions", CHAT),
                           ("/generate", {"prompt": "a"})):
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body | ENDLESS)
            server.settle()
        waiting = threading.Thread(target=lambda: leave(server, "/v1/completions",
                                                        {"prompt": "a", "stream": True} | ENDLESS, after=400))
        waiting.start()
        wait_for(lambda: server.llm.snapshot().num_running == 1)
        with pytest.raises(httpx.ReadTimeout):  # never gets to run
            client.post("/v1/completions", json={"prompt": "a", "stream": True} | ENDLESS)
        wait_for(lambda: server.llm.snapshot().num_waiting == 0)
        waiting.join()
    server.settle()


def test_deadlines(scripted: Callable[..., Running]) -> None:
    """What has not begun gets a status, what has is told in the stream."""
    server = scripted(Vocabulary([]), {}, ENGINE | {"max_num_seqs": 1}, request_timeout=0.5)
    slowly(server.llm, 0.002)
    whole = server.post("/v1/completions", prompt="a", **ENDLESS)
    assert whole.status_code == 504 and whole.json()["error"]["code"] == "timeout"
    body = {"prompt": "a", "stream": True} | ENDLESS
    streamed = server.post("/v1/completions", **body).text.split("\n\n")
    assert '"code":"timeout"' in streamed[-3] and streamed[-2] == "data: [DONE]" and len(streamed) > 20
    server.settle()


def test_a_full_queue_is_told_at_once(scripted: Callable[..., Running]) -> None:
    server = scripted(Vocabulary([]), {}, ENGINE | {"max_num_seqs": 1})
    server.llm._engine._max_waiting = 1
    slowly(server.llm, 0.002)
    long = {"prompt": "a", "stream": True} | ENDLESS
    readers = [threading.Thread(target=leave, args=(server, "/v1/completions", long), kwargs={"after": 300})
               for _ in range(2)]
    readers[0].start()
    wait_for(lambda: server.llm.snapshot().num_running == 1)
    readers[1].start()
    wait_for(lambda: server.llm.snapshot().num_waiting == 1)
    for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, {"prompt": ["a", "b"]}):
        refused = server.post("/v1/completions", **body)
        assert refused.status_code in (429, 400) and refused.headers.get("retry-after") == "1"
        assert refused.json()["error"] | {"message": ""} == {
            "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    assert server.llm.snapshot().num_refused == 3
    for reader in readers:
        reader.join()
    server.settle()
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
