"""A server in a process of its own: load, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from jaxserve import LLM, SamplingParams
from tests.server.conftest import ROOT, ServerProcess, server_process, wait_for

PROMPTS = ["The quick brown", "def f(x):\n", "日本語 and 😀", "a", "Numbers 0 1 2 3"]
WATCH = """\
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=10)
while True:
    start = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    print(answer.status, time.perf_counter() - start, flush=True)
    time.sleep(0.02)
"""


def metrics(url: str) -> dict[str, float]:
    """Values without labels that matter here."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {line.split("{")[0].removeprefix("jaxserve:"): float(line.rsplit(" ", 1)[1])
            for line in lines if line.startswith("jaxserve:")}


async def chaos(url: str, alone: dict[str, str], count: int) -> list[int]:
    """Statuses of so many streams at once: 30% leave midway, 10% are malformed, and the others get what they get
    alone."""
    async def ask(client: httpx.AsyncClient, index: int) -> int:
        rng = random.Random(index)
        prompt = rng.choice(PROMPTS)
        body: dict[str, Any] = {"prompt": prompt, "temperature": 0, "max_tokens": 30, "ignore_eos": True,
                                "stream": True}
        if index % 10 == 0:
            body |= rng.choice([{"temperature": -1}, {"prompt": []}, {"n": 0}, {"logit_bias": {"x": 1}}])
        leaves_after = rng.randrange(1, 20) if index % 10 in (1, 2, 3) else None
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            text, pieces = "", 0
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    pieces += 1
                if leaves_after is not None and pieces >= leaves_after:
                    return answer.status_code
            if answer.status_code == 200:
                assert text == alone[prompt]
            return answer.status_code

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(ask(client, index) for index in range(count)))


def test_two_hundred_streams_with_rude_clients(tiny_folder: Path, tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = tiny_llm.generate(PROMPTS, params, use_tqdm=False)
    alone = {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}
    with server_process(tiny_folder, "--max-num-seqs", "4", "--enable-debug-endpoints") as server:
        asyncio.run(chaos(server.url, alone, 20))
        process = psutil.Process(server.popen.pid)
        before = process.num_fds(), process.memory_info().rss, process.num_threads()
        watcher = subprocess.Popen([sys.executable, "-c", WATCH, server.url.removeprefix("http://")],
                                   stdout=subprocess.PIPE, text=True)
        assert watcher.stdout is not None
        watcher.stdout.readline()
        statuses = asyncio.run(chaos(server.url, alone, 200))
        watcher.terminate()
        seen = [line.split() for line in watcher.communicate()[0].splitlines()]
        assert statuses.count(400) == 20 and set(statuses) == {200, 400}
        seconds = sorted(float(took) for _, took in seen)
        print(f"/health: {len(seen)} times, median {seconds[len(seen) // 2] * 1e3:.1f} ms, worst "
              f"{seconds[-1] * 1e3:.0f} ms")
        assert {status for status, _ in seen} == {"200"} and len(seen) > 20
        # The worst one is the machine's as much as the server's, where others use its cores.
        assert seconds[int(0.98 * len(seen))] < 0.1
        wait_for(lambda: metrics(server.url)["num_requests_running"] == 0)
        found = metrics(server.url)
        assert found["num_requests_waiting"] == 0 and found["kv_cache_usage_perc"] == 0
        assert httpx.get(f"{server.url}/debug/memory").json()["num_used"] == 0
        wait_for(lambda: process.num_fds() <= before[0] + 1)
        assert process.num_threads() <= before[2] + 1
        assert process.memory_info().rss - before[1] < 40 << 20


def ask_for_streams(server: ServerProcess, count: int, max_tokens: int) -> list[httpx.Response]:
    """Streams, sent SIGTERM once they have all begun."""
    begun: list[int] = []

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        body = {"prompt": "fox", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            content = b""
            async for piece in answer.aiter_raw():
                if not content:
                    begun.append(1)
                content += piece
                if len(begun) == count:
                    begun.append(0)
                    server.popen.send_signal(signal.SIGTERM)
            return httpx.Response(answer.status_code, content=content)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client) for _ in range(count)))

    return asyncio.run(main())


def test_sigterm_lets_running_requests_finish(tiny_folder: Path) -> None:
    with server_process(tiny_folder, "--max-num-seqs", "4", "--log-json") as server:
        answers = ask_for_streams(server, 4, 100)
        assert server.popen.wait(20) == 0
        for answer in answers:
            events = answer.text.split("\n\n")
            assert events[-2] == "data: [DONE]" and '"finish_reason":"length"' in events[-3]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        wait_for(lambda: sum('"path": "/v1/completions"' in line for line in server.log) == 4)
        logged = [json.loads(line) for line in server.log if '"path": "/v1/completions"' in line]
        assert all(each["status"] == 200 and each["generated_tokens"] == 100 and each["request_id"] for each in logged)
        assert "fox" not in "".join(server.log), "bodies are not logged"


def test_what_outlasts_the_grace_period_is_told(tiny_folder: Path) -> None:
    with server_process(tiny_folder, "--max-num-seqs", "4", "--shutdown-timeout", "0.01") as server:
        start = time.monotonic()
        answers = ask_for_streams(server, 4, 120)
        assert server.popen.wait(20) == 0 and time.monotonic() - start < 15
        ends = [answer.text.split("\n\n")[-3] for answer in answers]
        assert any("the engine was shut down" in end for end in ends)
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)


def test_every_engine_option_has_a_flag() -> None:
    from dataclasses import fields

    from jaxserve import EngineConfig
    from jaxserve.cli.serve import ServingOptions

    flags = {field.name for field in fields(ServingOptions)}
    assert {field.name for field in fields(EngineConfig)} - flags == {"priority_weights"}
    given = ServingOptions(speculative_config='{"method": "ngram"}', swap_space=1.5).arguments()
    assert given == {"speculative_config": {"method": "ngram"}, "swap_space": 1.5}


def test_wrong_settings_are_one_line(tiny_folder: Path) -> None:
    for options, message in (
            (["--tool-call-parser", "x"], "tool_call_parser='x'"), (["--metrics-prefix", "a b"], "metrics_prefix"),
            (["--enable-auto-tool-choice"], "enable_auto_tool_choice"), (["--model", "x"], "MODEL or --model"),
            (["--speculative-config", "{"], "speculative_config"),
            (["--host", "no.such.host.invalid"], "port"), (["--chat-template", "none.jinja"], "chat_template")):
        done = subprocess.run([sys.executable, "-m", "jaxserve.server", str(tiny_folder), *options], cwd=ROOT,
                              capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
