"""The arithmetic on timelines written by hand; the client against a server that answers from a script."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from jaxserve.cli import app
from jaxserve.errors import InvalidInputError, JaxserveError
from jaxserve.server.bench.client import Target, Timeline, events, measure
from jaxserve.server.bench.figures import figures, percentile
from jaxserve.server.bench.prompts import Prompt, arrivals, file_prompts, random_prompts
from tests.server.stand_in import Body, Script, StandIn, serve

# ---------------------------------------------------------------------------------------------------------- arithmetic


def test_figures_of_a_known_run() -> None:
    found = figures([
        Timeline(start=10.0, arrivals=[10.5, 10.6, 10.8], end=11.0, num_prompt_tokens=4, num_output_tokens=6),
        Timeline(start=11.0, arrivals=[11.25], end=11.25, num_prompt_tokens=8, num_output_tokens=1),
        Timeline(start=11.0, arrivals=[11.5], end=14.0, num_prompt_tokens=9, num_output_tokens=9, error="timeout"),
        Timeline(start=11.5, end=11.6, error="HTTP 429: later"), Timeline(start=11.5, end=11.7, error="timeout")])
    assert found.duration == 4.0 and found.completed == 2
    assert found.errors == {"timeout": 2, "HTTP 429: later": 1}
    assert (found.total_input_tokens, found.total_output_tokens) == (12, 7)
    assert found.latencies["ttft"] == pytest.approx([500, 250])
    assert found.latencies["itl"] == pytest.approx([100, 200])
    assert found.latencies["e2el"] == pytest.approx([1000, 250])
    assert found.latencies["tpot"] == pytest.approx([(1000 - 500) / 5])  # an answer of one token has none
    written = found.as_json([99.0])
    assert written["request_throughput"] == 0.5 and written["output_throughput"] == 1.75
    assert written["total_token_throughput"] == 4.75 and written["failed"] == 3
    assert written["median_ttft_ms"] == pytest.approx(375) and written["p99_ttft_ms"] == pytest.approx(497.5)


def test_figures_of_nothing() -> None:
    written = figures([Timeline(start=1.0, end=1.0, error="timeout")]).as_json([50.0])
    assert written["completed"] == 0 and written["request_throughput"] == 0 and written["mean_ttft_ms"] is None
    assert figures([]).duration == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], point: float) -> None:
    assert percentile(values, point) == pytest.approx(np.percentile(values, point), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_arrivals_have_rate_and_spread(burstiness: float, spread: float) -> None:
    """The gamma distribution's coefficient of variation is 1 / sqrt(shape); that of a Poisson process's gaps is 1."""
    times = arrivals(20_001, 50.0, burstiness, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0 and min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.1) and pstdev(gaps) / mean(gaps) == pytest.approx(spread, rel=0.1)
    assert arrivals(3, float("inf")) == [0, 0, 0] and arrivals(5, 1.0, seed=1) != arrivals(5, 1.0, seed=2)


@pytest.mark.parametrize(("rate", "burstiness", "name"), [(0.0, 1.0, "request_rate"), (1.0, -1.0, "burstiness"),
                                                          (float("nan"), 1.0, "request_rate")])
def test_impossible_arrivals(rate: float, burstiness: float, name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{name}="):
        arrivals(3, rate, burstiness)


# ------------------------------------------------------------------------------------------------------------- prompts

def test_random_prompts_have_the_length_asked_for() -> None:
    prompts = random_prompts(40, 20, 10, range_ratio=0.5, prefix_len=3, seed=1)
    lengths = [len(prompt.text.split()) for prompt in prompts]
    assert min(lengths) >= 13 and max(lengths) <= 33 and len(set(lengths)) > 5
    assert {prompt.max_tokens for prompt in prompts} <= set(range(5, 16))
    assert len({" ".join(prompt.text.split()[:3]) for prompt in prompts}) == 1
    assert len({prompt.text for prompt in prompts}) == 40
    assert prompts == random_prompts(40, 20, 10, 0.5, 3, seed=1) != random_prompts(40, 20, 10, 0.5, 3, seed=2)
    with pytest.raises(InvalidInputError, match=r"^random_range_ratio=1\.0"):
        random_prompts(1, 1, 1, range_ratio=1.0)


def test_only_words_of_one_token_are_used() -> None:
    """With a tokenizer for which every word of four letters is one, every other two."""
    prompts = random_prompts(20, 30, 1, num_tokens=lambda text: sum(2 - (len(word) in (1, 4)) for word in text.split()))
    assert {len(word) for prompt in prompts for word in prompt.text.split()} == {4}


def test_prompts_from_files(tmp_path: Path) -> None:
    share = tmp_path / "share.json"
    talks = [[{"from": "human", "value": f"question {index}"}, {"from": "gpt", "value": "x" * 4 * index}]
             for index in range(1, 4)]
    share.write_text(json.dumps([{"conversations": talk} for talk in [*talks, [{"value": "alone"}]]]))
    assert set(file_prompts(share, 6)) == {Prompt("question 1", 1), Prompt("question 2", 2), Prompt("question 3", 3)}
    assert file_prompts(share, 1, output_len=9)[0].max_tokens == 9
    assert {one.max_tokens for one in file_prompts(share, 3, num_tokens=len)} == {4, 8, 12}
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a\\nb", "output_tokens": 5}\nplain text\n\n')
    assert set(file_prompts(lines, 2)) == {Prompt("a\nb", 5), Prompt("plain text", 128)}
    for text in ("", "[1]", '{"question": 1}', "[{"):
        lines.write_text(text)
        with pytest.raises(InvalidInputError, match=r"^dataset_path="):
            file_prompts(lines, 1)
    with pytest.raises(InvalidInputError, match="FileNotFoundError"):
        file_prompts(tmp_path / "none", 1)


# -------------------------------------------------------------------------------------------------------------- client

def answer(body: Body) -> Script:
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    match text:
        case "refuse":
            raise ValueError("too long")
        case "break":
            return ["a", {"error": {"message": "the engine stopped"}}]
        case "mute":
            return []
        case "hang":
            return ["a", 1.0, "b"]
        case _:
            return ["a", 0.01, "b", 0.01, "c"]


@pytest.fixture
def server() -> Iterator[StandIn]:
    with serve(StandIn(answer)) as state:
        yield state


def ask(server: StandIn, *texts: str, **more: Any) -> list[Timeline]:
    prompts = [Prompt(text, 5) for text in texts]
    options = {name: more.pop(name) for name in ("max_concurrency", "num_warmups", "on_done") if name in more}
    return asyncio.run(measure(Target(base_url=server.url, **more), prompts, [0.0] * len(prompts), **options))


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_timeline_of_an_answer(server: StandIn, backend: str) -> None:
    server.key = "secret"
    done: list[int] = []
    [found] = ask(server, "hi", backend=backend, api_key="secret", more={"ignore_eos": True},
                  on_done=lambda: done.append(1))
    assert found.error is None and done == [1]
    assert (found.num_prompt_tokens, found.num_output_tokens) == (7, 3)
    assert found.start < found.arrivals[0] and found.arrivals == sorted(found.arrivals)
    assert found.end - found.start >= 0.02 and found.end >= found.arrivals[-1]
    [body] = server.bodies
    asked = {"prompt": "hi"} if backend == "openai" else {"messages": [{"role": "user", "content": "hi"}]}
    assert body == {"model": "tiny", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
                    "ignore_eos": True} | asked


def test_failures_are_told_apart(server: StandIn) -> None:
    found = ask(server, "hi", "refuse", "break", "mute", "hang", timeout_s=0.5)
    assert [one.error for one in found] == [None, "HTTP 400: too long", "stream: the engine stopped",
                                            "stream: no text came", "timeout"]
    assert all(one.end >= one.start for one in found)


def test_a_server_that_is_not_there(server: StandIn) -> None:
    gone = StandIn(answer, url="http://127.0.0.1:9")
    assert [one.error for one in ask(gone, "hi", model="m")] == ["connection: ClientConnectorError"]
    with pytest.raises(JaxserveError, match="names no model"):
        ask(gone, "hi")
    with pytest.raises(JaxserveError, match="does not answer: HTTP 400: too long"):
        ask(server, "refuse", num_warmups=1)


def test_concurrency_is_kept_to() -> None:
    lock = threading.Lock()
    under_way, most = 0, 0

    def change(by: int) -> None:
        nonlocal under_way, most
        with lock:
            under_way += by
            most = max(most, under_way)

    class Answer(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from list.__iter__(self)
            change(-1)

    def counted(body: Body) -> Script:
        change(1)
        return Answer(["a", 0.05, "b"])

    with serve(StandIn(counted)) as state:
        found = ask(state, *["hi"] * 12, max_concurrency=3, num_warmups=1)
    assert 1 < most <= 3 and len(state.bodies) == 13 and not any(one.error for one in found)


@given(st.lists(st.text("ab: é", max_size=6).map(str.strip), max_size=5), st.data())
def test_events_however_they_are_cut(texts: list[str], data: st.DataObject) -> None:
    stream = "".join(f"data: {text}\r\n\r\n" for text in texts).encode() + b": comment\nevent: x\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))

    async def chunks() -> AsyncIterator[bytes]:
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            yield stream[begin:end]

    async def read() -> list[str]:
        return [event async for event in events(chunks())]

    assert asyncio.run(read()) == texts


# ------------------------------------------------------------------------------------------------------------- command

def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def test_command(server: StandIn, tmp_path: Path) -> None:
    figures_file, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    result = run("--base-url", server.url, "--num-prompts", 6, "--random-input-len", 4, "--request-rate", 200,
                 "--json", figures_file, "--plot", picture, "--metric-percentiles", "50,99.9", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert "Time to first token (TTFT)" in result.output and "p99.9" in result.output
    found = json.loads(figures_file.read_text())
    assert found["completed"] == 6 and found["total_output_tokens"] == 18 and found["total_input_tokens"] == 42
    assert found["median_ttft_ms"] > 0 and found["p99.9_e2el_ms"] >= found["p50_e2el_ms"] >= 20
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {len(body["prompt"].split()) for body in server.bodies} == {4}
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


def test_command_counts_failures(server: StandIn, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("refuse\nhi\n")
    base = ("--base-url", server.url, "--dataset-name", "custom", "--dataset-path", prompts, "--num-warmups", 0)
    result = run(*base, "--num-prompts", 4)
    assert result.exit_code == 0 and "2 failed: HTTP 400: too long" in result.output
    prompts.write_text("refuse\n")
    assert run(*base, "--num-prompts", 2).exit_code == 1


@pytest.mark.parametrize(("arguments", "message"), [
    (["--metric-percentiles", "101"], "metric_percentiles='101'"), (["--backend", "grpc"], "backend='grpc'"),
    (["--dataset-name", "sharegpt"], "dataset_path=None"), (["--dataset-name", "alpaca"], "dataset_name='alpaca'"),
    (["--plot", "figures.xyz"], "plot='figures.xyz'"), (["--request-rate", "0"], "request_rate=0.0")])
def test_wrong_options_are_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and f"jaxserve: {message} is not allowed" in result.output
