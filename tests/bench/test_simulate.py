"""The simulator against runs computed by hand, and what must hold of any run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import simulate
from bench.simulation import clock, fit
from bench.simulation.clock import PromptIds, Simulation
from bench.simulation.meters import Curve, Histogram, Point, summary
from bench.simulation.step_time import StepTime, buckets_of
from bench.simulation.trace import SHAREGPT_MEANS, SHAREGPT_MOST, Trace, read_trace, sharegpt_like
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidInputError
from jaxserve.planning import Plan, read_model
from jaxserve.planning.measure import StepBytes
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.plan import Chunk, StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.targets.target import get_target


def make_trace(arrival_s: list[float], prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(np.array(arrival_s), np.array(prompts, np.int32), np.array(outputs, np.int32))


def make_simulation(trace: Trace, *, num_blocks: int = 1000, max_num_seqs: int = 8, block_size: int = 4,
                    max_num_batched_tokens: int = 64, caching: bool = False) -> Simulation:
    """A step with chunks takes 1 s, one without half of that."""
    scheduler = Scheduler(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=max_num_batched_tokens, max_blocks_per_seq=64,
                          enable_prefix_caching=caching)
    return Simulation(scheduler, trace, lambda plan: 1.0 if plan.chunks else 0.5, max_num_seqs=max_num_seqs)


def random_trace(num_requests: int, seed: int = 0) -> Trace:
    draws = np.random.default_rng(seed)
    return make_trace(np.sort(draws.uniform(0, num_requests / 2, num_requests)).tolist(),
                      draws.integers(1, 60, num_requests).tolist(), draws.integers(1, 40, num_requests).tolist())


# Two slots. Both first requests prefill in [0, 1) and decode in [1, 1.5), when b ends; c prefills in [1.5, 2.5) beside
# a's third token, then both decode in [2.5, 3), when c ends, and a ends in [3, 3.5). d comes at 10, alone.
BY_HAND = make_trace([0.0, 0.0, 0.0, 10.0], [6, 3, 5, 4], [5, 2, 2, 1])


def test_times_computed_by_hand():
    simulation = make_simulation(BY_HAND, max_num_seqs=2)
    simulation.run()
    assert simulation.queue_s.tolist() == [0, 0, 1.5, 0]
    assert simulation.first_token_s.tolist() == [1, 1, 2.5, 1]
    assert simulation.end_to_end_s.tolist() == [3.5, 1.5, 3, 1]
    assert simulation.now_s == 11 and simulation.num_steps == 6
    # Between tokens: a 0.5, 1, 0.5, 0.5; b 0.5; c 0.5.
    assert simulation.between_tokens_s.count == 6
    assert simulation.between_tokens_s.mean_s == pytest.approx(3.5 / 6)
    found = summary(simulation.between_tokens_s)
    assert [found["p50_s"], found["p99_s"]] == pytest.approx([0.5, 1.0], rel=0.01)
    assert summary(simulation.first_token_s) == pytest.approx(
        {"mean_s": 5.5 / 4, "p50_s": 1.0, "p90_s": 1 + 0.7 * 1.5, "p99_s": 1 + 0.97 * 1.5})


def test_occupancy_computed_by_hand():
    simulation = make_simulation(BY_HAND, max_num_seqs=2, num_blocks=11)
    simulation.run()
    occupancy = simulation.occupancy
    # Blocks of 4, per step: 2 + 1, 2 + 1, 2 + 2, 3 + 2, 3, 1, of 10.
    used = 1 * 3 + 0.5 * 3 + 1 * 4 + 0.5 * 5 + 0.5 * 3 + 1 * 1
    assert occupancy.shares(occupancy.all) == pytest.approx(
        {"seconds": 4.5, "batch_occupancy": (2 * 3 + 1.5) / 2 / 4.5, "block_utilisation": used / 10 / 4.5})
    # c waits while the first two steps run.
    assert occupancy.shares(occupancy.saturated) == pytest.approx(
        {"seconds": 1.5, "batch_occupancy": 1.0, "block_utilisation": 0.3})
    assert occupancy.waste == pytest.approx(1 - 9 / 12)  # of the first step alone
    assert occupancy.curve.points[:3] == [Point(0, 2, 1, 0.3), Point(1, 2, 1, 0.3), Point(1.5, 2, 0, 0.4)]
    assert occupancy.curve.points[-1] == Point(10, 1, 0, 0.1)


def test_budget_bound_steps_are_not_saturated():
    simulation = make_simulation(make_trace([0.0, 0.0], [8, 8], [1, 1]), max_num_batched_tokens=8)
    simulation.run()
    assert simulation.num_steps == 2
    assert simulation.occupancy.shares(simulation.occupancy.saturated) == {
        "seconds": 0, "batch_occupancy": None, "block_utilisation": None}


@pytest.mark.parametrize("caching", [False, True])
def test_conservation(caching):
    trace = random_trace(400)
    simulation = make_simulation(trace, num_blocks=60, caching=caching)
    while simulation.num_finished < len(trace):
        simulation.step()
        simulation.scheduler.check_integrity()
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.num_output_tokens == trace.output_tokens.sum()
    assert simulation.between_tokens_s.count == trace.output_tokens.sum() - len(trace)
    assert simulation.num_computed_tokens >= trace.prompt_tokens.sum() + trace.output_tokens.sum() - len(trace)
    assert simulation.scheduler.pool.num_used == 0 and not simulation.scheduler.has_requests
    assert (simulation.queue_s >= 0).all() and (simulation.queue_s < simulation.first_token_s).all()
    assert (simulation.first_token_s <= simulation.end_to_end_s).all()
    gaps_s = simulation.end_to_end_s - simulation.first_token_s
    assert simulation.between_tokens_s.sum_s == pytest.approx(gaps_s.sum(dtype=np.float64), rel=1e-4)


def test_waiting_outside_changes_nothing(monkeypatch):
    trace = random_trace(400).at_rate(math.inf, 0)
    everything = make_simulation(trace, num_blocks=60)
    everything.run()
    monkeypatch.setattr(clock, "_MOST_HANDED_OVER", 0)
    few = make_simulation(trace, num_blocks=60)
    longest = 0
    while few.num_finished < len(trace):
        few.step()
        longest = max(longest, len(few.scheduler.waiting))
    assert longest <= 16 + 8  # twice max_num_seqs, and those that were preempted
    for name in ("queue_s", "first_token_s", "end_to_end_s"):
        assert getattr(few, name).tolist() == getattr(everything, name).tolist()
    assert few.occupancy.curve.points == everything.occupancy.curve.points


def test_shared_prefix_is_computed_once():
    trace = make_trace([0.0] * 5, [7, 3, 9, 1, 4], [3] * 5).with_prefix(10)
    computed = {}
    for caching in (False, True):
        simulation = make_simulation(trace, max_num_seqs=1, caching=caching)
        simulation.run()
        computed[caching] = simulation.num_computed_tokens
    assert computed[False] == 24 + 5 * 10 + 5 * 2
    assert computed[True] == computed[False] - 4 * 8  # two whole blocks of 4, for all but the first


def test_prompt_ids():
    one, other = PromptIds(0, 7, num_shared=3), PromptIds(1, 7, num_shared=3)
    assert one[:3] == other[:3] and one[3] != other[3] and one[:7] != other[:7]
    assert list(one) == one[:] and len(one[2:20]) == 5
    request = Request(request_id="", prompt_token_ids=one, params=SamplingParams(),  # type: ignore[arg-type]
                      max_total_tokens=9)
    request.append(5)
    assert request.known_tokens(5, 8) == [one[5], one[6], 5]


def test_same_seed_same_run():
    def run(seed: int) -> tuple[Any, ...]:
        simulation = make_simulation(sharegpt_like(50, seed).at_rate(2.0, seed), block_size=32, num_blocks=200)
        simulation.run()
        return simulation.now_s, simulation.end_to_end_s.tolist()

    assert run(3) == run(3) and run(3) != run(4)


def test_sharegpt_like_lengths():
    trace = sharegpt_like(200_000, seed=1)
    for lengths, mean, most in zip((trace.prompt_tokens, trace.output_tokens), SHAREGPT_MEANS, SHAREGPT_MOST,
                                   strict=True):
        assert lengths.min() >= 1 and lengths.max() == most
        assert lengths.mean() == pytest.approx(mean, rel=0.02)
        assert np.median(lengths) < 0.8 * mean  # a long tail


def test_poisson_arrivals():
    arrival_s = sharegpt_like(100_000, seed=0).at_rate(25.0, seed=0).arrival_s
    gaps_s = np.diff(arrival_s)
    assert (gaps_s >= 0).all()
    assert gaps_s.mean() == pytest.approx(1 / 25, rel=0.02) and gaps_s.std() == pytest.approx(1 / 25, rel=0.02)
    assert not sharegpt_like(3, seed=0).at_rate(math.inf, seed=0).arrival_s.any()


def test_histogram_percentiles():
    values = np.random.default_rng(0).lognormal(-4, 2, 20_000)
    histogram = Histogram()
    for value in values.tolist():
        histogram.add(value)
    for percent in (1, 50, 90, 99):
        assert histogram.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.02)
    assert histogram.mean_s == pytest.approx(values.mean())
    assert set(summary(Histogram()).values()) == set(summary(np.array([np.nan])).values()) == {None}


def test_curve_stays_short():
    curve = Curve(most=16)
    for step in range(1000):
        curve.add(step, 0, 0, 0.0)
    times_s = curve.columns()["time_s"]
    assert 8 <= len(times_s) < 16 and set(np.diff(times_s)) == {128}


# The step's time


STEP = StepBytes(weights=3 * 10**9, read_weights=2 * 10**9, block=2 * 10**6, state=0, temporaries=0, compile_s=0.0)


def make_plan(windows: tuple[int | None, ...] = (), **options: Any) -> Plan:
    read = read_model("Llama-3.1-8B")
    read = replace(read, layer_windows=windows or read.layer_windows)
    return Plan(read, EngineConfig(**options).resolve(read, "gpu"), get_target("h200"), 1, STEP)


def a_request() -> Request:
    return Request(request_id="", prompt_token_ids=[1], params=SamplingParams(), max_total_tokens=2)


WINDOWS: tuple[int | None, ...] = (None, 4096) * 16


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("context", [100, 20_000])
def test_decode_takes_its_roofline(windows, context):
    roofline = make_plan(windows).roofline
    plan = StepPlan(decodes=[a_request()] * 12, positions=[context - 1] * 12)
    step_time = StepTime(roofline, None, efficiency=0.5, overhead_s=0.25)
    assert step_time(plan) == pytest.approx(roofline.decode(context, 12).seconds / 0.5 + 0.25)


@pytest.mark.parametrize("windows", [(), WINDOWS], ids=["full", "windows"])
def test_prefill_takes_its_roofline(windows):
    roofline = make_plan(windows).roofline
    step_time = StepTime(roofline, None, 1.0, 0.0)
    chunks = [Chunk(a_request(), 0, 6000, False), Chunk(a_request(), 6000, 3000, True)]
    assert sum(step_time(StepPlan(chunks=[chunk])) for chunk in chunks) == pytest.approx(
        roofline.prefill(9000, 6000).seconds)


def test_windows_bound_what_is_read():
    step_time = StepTime(make_plan(WINDOWS).roofline, None, 1.0, 0.0)
    near, far, full = (step_time(StepPlan(decodes=[a_request()] * 500, positions=[position] * 500))
                       for position in (9_999, 19_999, 4_095))
    layer_s = 500 * STEP.block / 16 / 32 / get_target("h200").bandwidth_bytes_per_s
    assert far - near == pytest.approx(16 * 10_000 * layer_s) and near - full == pytest.approx(16 * 5904 * layer_s)


def test_padding_costs_time():
    plan = make_plan()
    padded, exact = (StepTime(plan.roofline, buckets, 1.0, 0.0) for buckets in (buckets_of(plan), None))
    steps = [StepPlan(chunks=[Chunk(a_request(), 0, num_tokens, False)]) for num_tokens in (2049, 4096)]
    assert padded(steps[0]) == pytest.approx(padded(steps[1]), rel=0.07)  # but for attention
    assert exact(steps[0]) < 0.6 * exact(steps[1])


# Files and the command


def test_files(tmp_path):
    rows = [(2.0, 3, 4), (0.5, 7, 1)]
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    (tmp_path / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    for name in ("a.csv", "a.jsonl"):
        trace = read_trace(tmp_path / name)
        assert (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == (
            [0.5, 2.0], [7, 3], [1, 4])
        assert len(read_trace(tmp_path / name, 1)) == 1


@pytest.mark.parametrize("name, text, message", [
    ("a.csv", "arrival_s,prompt_tokens\n0,1\n", "output_tokens of request 1=None is not allowed: an integer"),
    ("a.csv", "arrival_s,prompt_tokens,output_tokens\n0,1,2\n0,0,2\n", "prompt_tokens of request 2='0'"),
    ("a.csv", "arrival_s,prompt_tokens,output_tokens\n-1,1,2\n", "arrival_s of request 1='-1' is not allowed: seconds"),
    ("a.csv", "arrival_s,prompt_tokens,output_tokens\n", "at least one request"),
    ("a.jsonl", '{"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}', "prompt_tokens of request 1=1.5"),
    ("a.jsonl", "[1, 2, 3]", "arrival_s of request 1=None"),
    ("a.jsonl", "\n{", "line 2 of trace"),
    ("a.txt", "", "a .jsonl file of objects"),
])
def test_bad_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError) as error:
        read_trace(tmp_path / name)
    assert message in str(error.value)


def test_too_long_requests():
    trace = make_trace([0.0, 0.0], [10, 90], [10, 30])
    trace.check(max_model_len=120, capacity_tokens=119)
    for limits in ((119, 1000), (1000, 118)):
        with pytest.raises(InvalidInputError, match="request 1=120 is not allowed: at most 119"):
            trace.check(max_model_len=limits[0], capacity_tokens=limits[1])


@pytest.fixture
def card(monkeypatch) -> None:
    """An H200 with a model that nobody has to compile."""
    def plan_card(model: str, *, target: str, max_num_seqs: int | None, **options: Any) -> Plan:
        return make_plan(max_num_seqs=max_num_seqs)

    monkeypatch.setattr(simulate, "plan_card", plan_card)


def test_command(card, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    simulate.main(["--num-requests", "60", "--rate", "20", "--max-num-seqs", "8", "--json", str(file), "--plot",
                   str(picture)])
    found = json.loads(file.read_text())
    assert found["requests"] == 60 and found["output_tokens"] == sharegpt_like(60, 0).output_tokens.sum()
    assert found["computed_share"] == 1 and 0 < found["waste"] < 0.1 and 0 < found["whole_run"]["batch_occupancy"] <= 1
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("options, message", [
    (["--rate", "0"], "rate=0.0 is not allowed"),
    (["--rate", "nan"], "rate=nan"),
    (["--num-requests", "0"], "num_requests=0"),
    (["--trace", "nowhere.csv"], "trace='nowhere.csv' is not allowed: sharegpt-like"),
    (["--efficiency", "0"], "efficiency=0.0"),
    (["--step-overhead-ms", "-1"], "overhead_s=-0.001"),
    (["--shared-prefix", "-1"], "shared_prefix=-1"),
    (["--num-blocks", "1"], "num_blocks=1"),
    (["--num-blocks", "20"], "at most 305"),
    (["--plot", "a.nothing"], "whose name ends in"),
])
def test_bad_options(card, capsys, options, message):
    with pytest.raises(SystemExit):
        simulate.main(options)
    assert message in capsys.readouterr().err


def test_no_matplotlib(card, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit):
        simulate.main(["--plot", str(tmp_path / "a.png")])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_model_that_does_not_fit(monkeypatch, capsys):
    import bench.simulation.step_time as step_time

    monkeypatch.setattr(step_time, "plan", lambda model, **options: make_plan(gpu_memory_utilization=0.01))
    with pytest.raises(SystemExit):
        simulate.main(["--model", "llama-8b"])
    assert "weights and temporaries lack 1.5 GB" in capsys.readouterr().err


def test_line():
    line = fit.line_through({size: 2e-6 * size + 3e-5 for size in (16, 64, 4096)})
    assert (line.slope_s, line.intercept_s, line.r_squared) == pytest.approx((2e-6, 3e-5, 1.0))
    assert line.worst < 1e-6


def test_measured_loads():
    few, many = fit.measure([(4, 10), (512, 10)], num_calls=32)
    assert 0 < few < many


def test_traces_are_files_on_the_command_line(card, tmp_path):
    (Path(tmp_path) / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n5,10,2\n6,4,1\n")
    found = simulate.main(["--trace", str(tmp_path / "t.csv"), "--max-num-seqs", "8"])
    assert found["requests"] == 2 and found["output_tokens"] == 3
    assert 1 < found["virtual_s"] < 2
