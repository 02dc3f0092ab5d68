"""Servers on a free port of this machine, in a thread, for real clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from jaxserve import AsyncLLM
from jaxserve.server.app import create_app
from jaxserve.server.connection import Connection
from jaxserve.server.settings import ServerSettings
from jaxserve.server.tracing import Tracing
from tests.conftest import TINY_OPTIONS
from tests.faults.scripted import Vocabulary, scripted_async_llm

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Running:
    """A server and its clients.

    Attributes:
      http: sends raw requests. ai: the real client of OpenAI, without retries.
    """

    url: str
    llm: AsyncLLM
    http: httpx.Client
    ai: Any  # openai.OpenAI, whose types know no plain dicts

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def settle(self) -> None:
        """Waits until the engine has nothing to do; then nothing may be held."""
        deadline = time.monotonic() + 10
        while self.llm._engine.has_unfinished or self.llm._commands:
            assert time.monotonic() < deadline, "requests go on"
            time.sleep(0.005)
        scheduler = self.llm._engine.scheduler
        scheduler.check_integrity()
        assert not scheduler.has_requests and scheduler.pool.num_used == 0 and not self.llm._mailboxes


def serve(llm: AsyncLLM, *, key: str = "none", tracing: Tracing | None = None, **settings: Any) -> Iterator[Running]:
    """One server; shuts the engine down in the end."""
    given: dict[str, Any] = {"served_model_name": ("tiny",), "warmup": False} | settings
    config = uvicorn.Config(create_app(llm, ServerSettings(**given), tracing), http=Connection, port=0, log_config=None,
                            timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server does not start"
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with (httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60) as http,
          openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as ai):
        yield Running(url, llm, http, ai)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
    llm.shutdown()


@dataclass
class ServerProcess:
    """`python -m jaxserve.server` with the tiny Llama.

    Attributes:
      log: what it has written to stderr.
    """

    url: str
    popen: subprocess.Popen[str]
    log: list[str]


@contextmanager
def server_process(folder: Path, *options: str) -> Iterator[ServerProcess]:
    """Runs one on a free port; ready when it is yielded. Killed at the end unless it has ended."""
    command = [sys.executable, "-m", "jaxserve.server", str(folder), "--port", "0", "--max-model-len", "128",
               "--max-num-batched-tokens", "32", "--block-size", "4", "--num-gpu-blocks-override", "200", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as popen:
        assert popen.stderr is not None
        log: list[str] = []
        lines = iter(popen.stderr.readline, "")
        reader = threading.Thread(target=lambda: log.extend(lines), daemon=True)
        try:
            url = None
            for line in lines:
                log.append(line)
                if found := re.search(r"serving .* at (http://[\w.:]+)", line):
                    url = found[1]
                    break
            assert url is not None, "".join(log)
            reader.start()
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 120)
            yield ServerProcess(url, popen, log)
        finally:
            popen.kill()


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Iterator[Running]:
    """The tiny Llama of `tiny_llm`, with debug endpoints."""
    yield from serve(AsyncLLM(str(tiny_folder), **TINY_OPTIONS), enable_debug_endpoints=True)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers of given engines: `start(llm, **settings)`."""
    running: list[Iterator[Running]] = []

    def start(llm: AsyncLLM, **settings: Any) -> Running:
        running.append(serve(llm, **settings))
        return next(running[-1])

    yield start
    for each in running:
        assert next(each, None) is None


@pytest.fixture
def scripted(start: Callable[..., Running]) -> Callable[..., Running]:
    """Starts servers that answer as a test says: `scripted(vocabulary, {"a": ids}, engine options, **settings)`."""
    def scripted(vocabulary: Vocabulary, scripts: Mapping[str, Sequence[int]],
                 engine: Mapping[str, Any] | None = None, **settings: Any) -> Running:
        llm: Any = scripted_async_llm(vocabulary, scripts, **(engine or {}))
        llm.device_memory = llm.device_utilization = dict  # it has no devices
        return start(llm, **settings)

    return scripted


def slowly(llm: AsyncLLM, seconds: float) -> None:
    """Makes every step of a scripted engine take so long."""
    runner: Any = llm._engine.runner
    dispatch = runner.dispatch

    def slow(plan: Any) -> Any:
        time.sleep(seconds)
        return dispatch(plan)

    runner.dispatch = slow


def wait_for(true: Callable[[], bool], most_s: float = 10.0) -> None:
    deadline = time.monotonic() + most_s
    while not true():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)
