"""The files in deploy/ are well-formed, name metrics and options that exist, and nginx passes streams on at once."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from jaxserve.cli import app
from jaxserve.server.metrics import ALIASES, COUNTERS, GAUGES, HISTOGRAMS
from tests.server.stand_in import Body, Script, StandIn, serve

DEPLOY = Path(__file__).parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

EXPORTED = {*GAUGES, *(f"{name}_total" for name in [*COUNTERS, "request_success"]),
            *(f"{name}_{part}" for name in [*HISTOGRAMS, *ALIASES] for part in ("bucket", "sum", "count")),
            "device_memory_used_bytes", "device_memory_limit_bytes", "device_utilization_ratio"}


def manifest(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text())


def container() -> Any:
    [found] = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)."""
    for panel in json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])
    for rule in manifest("prometheus-adapter.yaml")["rules"]["custom"]:
        yield "adapter", rule["seriesQuery"]


def test_every_metric_is_exported() -> None:
    asked = {(where, name) for where, text in expressions() for name in re.findall(r"jaxserve:(\w+)", text)}
    assert len(asked) > 25
    assert {(where, name) for where, name in asked if name not in EXPORTED} == set()
    # What operators look for is somewhere to be seen.
    assert {"num_requests_running", "num_requests_waiting", "num_preemptions_total", "kv_cache_usage_perc",
            "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total",
            "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
            "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_sum"} <= {name for _, name in asked}


def test_dashboard_is_laid_out() -> None:
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    cells = [(x, y) for place in (panel["gridPos"] for panel in panels)
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    for where, text in expressions():
        assert all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}")), where


def test_the_autoscaler_asks_for_what_the_adapter_gives() -> None:
    autoscaler = manifest("hpa.yaml")["spec"]
    [metric] = autoscaler["metrics"]
    assert metric["pods"]["metric"]["name"] in {
        rule["name"]["as"] for rule in manifest("prometheus-adapter.yaml")["rules"]["custom"]}
    deployment = manifest("deployment.yaml")
    assert autoscaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], manifest("service.yaml")["spec"]["selector"],
                     manifest("pdb.yaml")["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()


def test_options_of_the_container_exist() -> None:
    commands: Any = get_command(app)
    known = {name for option in commands.commands["serve"].params for name in option.opts}
    arguments = container()["args"]
    assert arguments[0] == "serve"
    assert {argument.split("=")[0] for argument in arguments if argument.startswith("--")} <= known
    command = json.loads(re.findall(r"^CMD (.*)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[-1])
    assert command[0] == "serve" and {argument for argument in command if argument.startswith("--")} <= known


def test_a_pod_has_time_to_finish_its_answers() -> None:
    pod = manifest("deployment.yaml")["spec"]["template"]["spec"]
    [shutdown] = [one.split("=")[1] for one in container()["args"] if one.startswith("--shutdown-timeout=")]
    pause = container()["lifecycle"]["preStop"]["exec"]["command"][1]
    assert pod["terminationGracePeriodSeconds"] > float(shutdown) + float(pause)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["httpGet"]["path"] == "/health"


def test_nobody_is_root() -> None:
    """The image's last user is a number, as Kubernetes needs to tell, and the manifest insists on the same one."""
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    assert len(stages) > 2, "more than one stage"
    [user] = re.findall(r"^USER (\d+)(?::\d+)?$", stages[-1], re.MULTILINE)
    assert int(user) != 0 and f"--uid {user} " in stages[-1] and "HEALTHCHECK" in stages[-1]
    pod = manifest("deployment.yaml")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == int(user)
    assert not container()["securityContext"]["allowPrivilegeEscalation"]


def test_everything_that_the_image_copies_is_there() -> None:
    root = DEPLOY.parent
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for line in re.findall(r"^COPY (?!--from)(.*)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        for name in line.split()[:-1]:
            assert (root / name).exists() and f"!{name}" in ignored, name
    data = (root / "pyproject.toml").read_text()
    assert '"jaxserve.server" = ["chat_page/*"]' in data, "the chat page is not installed"


@pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl")
def test_kustomize_puts_it_together() -> None:
    made = subprocess.run(["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert {one["kind"] for one in yaml.safe_load_all(made.stdout)} == {
        "Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}


@pytest.fixture
def servers() -> Iterator[list[StandIn]]:
    def answer(body: Body) -> Script:
        return ["first", 1.0, "last"]

    with serve(StandIn(answer)) as one, serve(StandIn(answer)) as other:
        yield [one, other]


@pytest.fixture
def balancer(servers: list[StandIn], tmp_path: Path) -> Iterator[str]:
    """Address of an nginx that runs deploy/nginx.conf with other ports."""
    if NGINX is None:
        pytest.skip("there is no nginx: apt-get install nginx-light")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in (("127.0.0.1:8000", servers[0].url[7:]), ("127.0.0.1:8001", servers[1].url[7:]),
                     ("listen 80;", f"listen 127.0.0.1:{port};"), ("worker_processes auto;", "worker_processes 1;"),
                     ("/var/log/nginx/access.log", str(tmp_path / "access.log"))):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    config, log = tmp_path / "nginx.conf", tmp_path / "error.log"
    config.write_text(f"daemon off; pid {tmp_path}/pid; error_log {log};\n{text}")
    command = [NGINX, "-e", str(log), "-p", str(tmp_path), "-c", str(config)]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen(command) as process:
        try:
            for _ in range(200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_nginx_streams_and_spreads(balancer: str, servers: list[StandIn]) -> None:
    """The first token comes long before the last, and the second request goes to the server that is free."""
    def ask(_: int) -> float:
        request = urllib.request.Request(f"{balancer}/v1/completions", data=b'{"prompt": "hi"}', method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert b"first" in answer.readline()
            first = time.monotonic()
            assert b"last" in answer.read()
            return time.monotonic() - first

    with ThreadPoolExecutor(2) as pool:
        gaps = list(pool.map(ask, range(2)))
    assert min(gaps) > 0.5
    assert [len(server.bodies) for server in servers] == [1, 1]


def test_nginx_goes_on_without_a_server_that_is_gone(balancer: str, servers: list[StandIn]) -> None:
    servers[0].close()
    for _ in range(3):
        with urllib.request.urlopen(f"{balancer}/v1/models", timeout=60) as answer:
            assert json.load(answer) == {"data": [{"id": "tiny"}]}
