"""Two replicas behind the real Ray Serve, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray")

from ray.serve.schema import ServeDeploySchema

from jaxserve import LLM
from jaxserve.errors import EngineDeadError, InvalidInputError
from jaxserve.request import SamplingParams
from jaxserve.server import ray_app
from tests.server.conftest import ROOT, wait_for
from tests.tiny import make_tiny_model

OPTIONS: dict[str, Any] = dict(max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=16, block_size=16,
                               num_gpu_blocks_override=600)
KEY = "secret"
LONG = 1800
"""Tokens of a stream that goes on for seconds."""


@dataclass
class Replicated:
    """`jaxserve serve --ray --replicas 2`, and what it has started."""

    url: str
    popen: subprocess.Popen[str]
    log: list[str]
    http: httpx.Client

    def pids(self) -> set[int]:
        """Of the replicas."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return {child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE
                and "ServeReplica:jaxserve" in " ".join(child.cmdline())}

    def metric(self, name: str) -> dict[str, float]:
        """Replica -> its value; all that there are."""
        return {sample.labels["replica"]: sample.value
                for family in text_string_to_metric_families(self.http.get("/metrics").text)
                for sample in family.samples if sample.name == name}

    def running(self) -> dict[str, float]:
        return self.metric("jaxserve:num_requests_running")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("ray") / "tiny", max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Replicated]:
    flags = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "jaxserve.server", str(folder), "--ray", "--replicas", "2", "--port", "0",
               "--served-model-name", "tiny", "--api-key", KEY, *flags]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    log: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                          env=environment | {"JAX_PLATFORMS": "cpu"}) as popen:
        assert popen.stdout is not None
        lines = iter(popen.stdout.readline, "")
        threading.Thread(target=lambda: log.extend(lines), daemon=True).start()
        try:
            wait_for(lambda: popen.poll() is not None or "serving tiny at" in "".join(log), 180)
            found = re.search(r"serving tiny at (http://[\w.:]+)", "".join(log))
            assert found is not None, "".join(log)
            with httpx.Client(base_url=found[1], headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
                yield Replicated(found[1], popen, log, http)
        finally:
            popen.kill()  # which ends Ray's processes too


def stream(server: Replicated, prompt: str, seen: Callable[[], None] = lambda: None) -> str:
    """The text of a long greedy stream.

    Raises:
      httpx.RemoteProtocolError: it was cut off.
    """
    body = {"prompt": prompt, "temperature": 0, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    text, done = "", False
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line:
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                seen()
    assert done
    return text


def test_it_answers_as_without_ray(server: Replicated, folder: Path) -> None:
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.generate("fox", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))[0].outputs[0].text
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as ai:
        asked: dict[str, Any] = dict(model="tiny", prompt="fox", temperature=0, max_tokens=20,
                                     extra_body={"ignore_eos": True})
        assert ai.completions.create(**asked).choices[0].text == expected
        pieces = [chunk.choices[0].text for chunk in ai.completions.create(**asked, stream=True)]
        assert "".join(pieces) == expected and len(pieces) > 10
        with pytest.raises(openai.BadRequestError, match="temperature"):
            ai.completions.create(**asked | {"temperature": -1, "stream": True})
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    named = server.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert named.headers.get_list("x-request-id") == ["mine"]
    wait_for(lambda: any('"request_id": "mine"' in line for line in server.log))


def test_both_work_and_metrics_tell_of_both(server: Replicated) -> None:
    before = server.metric("jaxserve:generation_tokens_total")
    assert len(before) == 2 and len(server.metric("process_resident_memory_bytes")) == 2
    body = {"prompt": "fox", "max_tokens": 50, "ignore_eos": True}
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: server.http.post("/v1/completions", json=body), range(48)))
    assert [answer.status_code for answer in answers] == [200] * 48
    made = {replica: value - before[replica]
            for replica, value in server.metric("jaxserve:generation_tokens_total").items()}
    assert sum(made.values()) == 48 * 50
    assert min(made.values()) >= 12 * 50, "the less busy one is asked"


def test_clients_that_leave_end_their_requests(server: Replicated) -> None:
    body = {"prompt": "fox", "max_tokens": LONG, "ignore_eos": True}
    before = sum(server.metric("jaxserve:generation_tokens_total").values())
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert sum(server.running().values()) == 1
    wait_for(lambda: not sum(server.running().values()))
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: not sum(server.running().values()))
    assert sum(server.metric("jaxserve:generation_tokens_total").values()) - before < 2 * LONG


def test_a_killed_replica_takes_only_its_own_requests_along(server: Replicated) -> None:
    prompts = ["fox", "The quick", "def f(x):", "0 1 2", "lazy dog", "日本語"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        expected = dict(zip(prompts, pool.map(lambda prompt: stream(server, prompt), prompts), strict=True))
    seen: Counter[str] = Counter()
    ended_s: dict[str, float] = {}

    def watched(prompt: str) -> str | None:
        try:
            return stream(server, prompt, lambda: seen.update([prompt]))
        except httpx.RemoteProtocolError:
            return None
        finally:
            ended_s[prompt] = time.monotonic()

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = []
        for prompt in prompts:
            answers.append(pool.submit(watched, prompt))
            wait_for(partial(seen.__contains__, prompt), 60)
        running, pids = server.running(), server.pids()
        assert sum(running.values()) == len(prompts) and min(running.values()) > 0 and len(pids) == 2
        victim = min(pids)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        # Nobody waits for the new one.
        body = {"prompt": "fox", "temperature": 0, "max_tokens": 5, "ignore_eos": True}
        for _ in range(10):
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert expected["fox"].startswith(answer.json()["choices"][0]["text"])
        found = {prompt: answer.result() for prompt, answer in zip(prompts, answers, strict=True)}
    lost = [prompt for prompt, text in found.items() if text is None]
    assert {prompt: text for prompt, text in found.items() if text is not None} == {
        prompt: text for prompt, text in expected.items() if prompt not in lost}
    assert max(ended_s[prompt] for prompt in lost) - killed_s < 5, "they are told at once"

    wait_for(lambda: len(server.pids() - {victim}) == 2 and len(server.running()) == 2, 120)
    after = server.running().keys()
    [gone], [new] = running.keys() - after, after - running.keys()
    assert len(lost) == running[gone]
    for _ in range(100):
        assert server.http.post("/v1/completions", json=body).status_code == 200
        if server.metric("jaxserve:generation_tokens_total").get(new):
            break
    else:
        pytest.fail("the new one gets nothing to do")


def test_sigterm_lets_requests_finish(server: Replicated) -> None:
    """The last test: afterwards nothing is left."""
    processes = psutil.Process(server.popen.pid).children(recursive=True)
    begun = threading.Event()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stream, server, "fox", begun.set)
        assert begun.wait(30)
        server.popen.send_signal(signal.SIGTERM)
        assert running.result(60)
    assert server.popen.wait(60) == 0, "".join(server.log)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_arguments_of_config_files() -> None:
    given = {"model": "m", "num_replicas": "2", "num_gpus": "0", "max_num_seqs": "4", "enable_prefix_caching": "false",
             "request_timeout": "1.5", "served_model_name": "a", "speculative_config": {"method": "ngram"}}
    deployment: Any = ray_app.build_app(given)._bound_deployment
    assert deployment.num_replicas == 2
    assert deployment.ray_actor_options | {"runtime_env": None} == {"num_cpus": 1, "num_gpus": 0, "runtime_env": None}
    assert deployment.ray_actor_options["runtime_env"]["env_vars"] == {"JAX_PLATFORMS": "cpu"}
    engine, settings = deployment.init_args
    assert engine["max_num_seqs"] == 4 and engine["enable_prefix_caching"] is False and engine["model"] == "m"
    assert settings.request_timeout == 1.5 and settings.served_model_name == ("a",)


@pytest.mark.parametrize("given, field", [
    ({"no_such": 1}, "no_such"), ({"max_num_seqs": "many"}, "max_num_seqs"), ({"num_replicas": 0}, "num_replicas"),
    ({"metrics_prefix": "a b"}, "metrics_prefix"), ({"model": None}, "model"), ({}, "num_gpus")])
def test_wrong_arguments(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        ray_app.build_app({"model": "m"} | ({"num_gpus": 0} if given else {}) | given)
    assert refused.value.field == field


def test_a_replica_whose_engine_has_failed_is_unwell() -> None:
    engine = SimpleNamespace(is_running=True)
    replica: Any = SimpleNamespace(_llm=engine)
    ray_app.Replica.check_health(replica)
    engine.is_running = False
    with pytest.raises(EngineDeadError):
        ray_app.Replica.check_health(replica)


def test_the_config_file_is_one() -> None:
    content = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
    [app] = ServeDeploySchema.model_validate(content).applications
    assert app.import_path == "jaxserve.server.ray_app:build_app"
    assert ray_app.build_app(app.args)._bound_deployment.ray_actor_options["num_gpus"] == 1


@pytest.mark.parametrize("before, arguments, message", [
    ("", ["--replicas", "2"], "replicas=2 is not allowed: 1 without --ray"),
    ("sys.modules['ray'] = None", ["--ray"], "pip install 'jaxserve[ray]'"),
    ("", ["--ray", "--max-num-batched-tokens", "0"], "max_num_batched_tokens=0")])
def test_wrong_commands_are_one_line(before: str, arguments: list[str], message: str) -> None:
    code = f"import sys\n{before}\nfrom jaxserve.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code, "serve", "no-model", *arguments], cwd=ROOT, check=False,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
