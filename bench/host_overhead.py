"""What the host does per step, with all sequences decoding and the device's step stubbed: milliseconds for schedule,
assembly and outputs. On a busy machine look at the CPU times: they leave out the waiting."""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import report
from bench.stub import StubServing
from jaxserve.request import RequestOutputKind, SamplingParams

_STOP_AND_LOGPROBS: dict[str, Any] = {"stop": ["\n\nQuestion:", "<end of answer>", "Observation:"], "logprobs": 5}
SCENARIOS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": ({"output_kind": RequestOutputKind.FINAL_ONLY}, 1.5),
    "plain, streamed": ({"output_kind": RequestOutputKind.DELTA}, 1.5),
    "stop, logprobs": (_STOP_AND_LOGPROBS | {"output_kind": RequestOutputKind.FINAL_ONLY}, 4.0),
    "stop, logprobs, streamed": (_STOP_AND_LOGPROBS | {"output_kind": RequestOutputKind.DELTA}, 4.0),
}
"""Sampling parameters of all requests, and the most milliseconds that the median step may take."""
PARTS = ("schedule", "assemble", "outputs")


class Timer:
    """Wall and CPU time spent in some methods, call by call."""

    def __init__(self) -> None:
        self.spent = np.zeros(2)

    def wrap(self, owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = _now()
            result = call(*args)
            self.spent += _now() - start
            return result

        setattr(owner, method, timed)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = _arguments(argv)
    scenarios = {name: found for name, found in SCENARIOS.items() if args.only is None or name in args.only}
    noise = report.Noise()
    results: dict[str, Any] = {}
    for name, (options, bar) in scenarios.items():
        wall, cpu = measure(args, options)
        if args.profile:
            measure(args, options, profile=True)
        results[name] = {"bar_ms": bar, "wall_ms": _statistics(wall), "cpu_ms": _statistics(cpu)}
    header = ["requests", "bar", "step: median", "p90", "best", "CPU: median", "p90",
              *(f"CPU: {part}" for part in PARTS)]
    rows = [[name, found["bar_ms"], *found["wall_ms"]["step"].values(), found["cpu_ms"]["step"]["median"],
             found["cpu_ms"]["step"]["p90"], *(found["cpu_ms"][part]["median"] for part in PARTS)]
            for name, found in results.items()]
    report.show(f"host work of a decode step of {args.num_seqs} sequences, ms", header, rows,
                [f"other processes kept {noise.cores():.2f} cores busy"])
    return report.write_json(args.json, {"num_seqs": args.num_seqs, "steps": args.steps, "scenarios": results})


def _arguments(argv: Sequence[str] | None) -> Any:
    parser = report.parser("bench.host_overhead", __doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400, help="measured ones; default 400")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="may be repeated; default: all")
    parser.add_argument("--uniform", action="store_true", help="tokens drawn uniformly, not as in text")
    parser.add_argument("--profile", action="store_true", help="also run under cProfile and print what costs most")
    return parser.parse_args(argv)


def measure(args: Any, options: dict[str, Any], *, profile: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Wall and CPU milliseconds of each step, [steps, 4]: the whole step and its PARTS."""
    serving = _running(args, options)
    engine = serving.engine
    profiler = cProfile.Profile()
    schedule, assemble = Timer(), Timer()
    if not profile:
        schedule.wrap(engine.scheduler, "schedule")
        assemble.wrap(engine.runner, "dispatch")
    for _ in range(30):  # first sights: token texts, growing lists
        engine.step()
    gc.collect()
    times = np.zeros((args.steps, 4, 2))
    if profile:
        profiler.enable()
    for row in times:
        schedule.spent, assemble.spent = np.zeros(2), np.zeros(2)
        start = _now()
        engine.step()
        whole = _now() - start
        row[:] = whole, schedule.spent, assemble.spent, whole - schedule.spent - assemble.spent
    if profile:
        profiler.disable()
        _print_profile(profiler, args.steps)
    assert len(engine.scheduler.running) == args.num_seqs, "some sequences have ended"
    engine.close()
    return 1e3 * times[..., 0], 1e3 * times[..., 1]


def _running(args: Any, options: dict[str, Any]) -> StubServing:
    """Every sequence has its prompt behind it and more tokens to go than will be measured."""
    num_tokens = args.steps + 100
    num_blocks = args.num_seqs * (num_tokens // 16 + 40)
    serving = StubServing(args.model, uniform=args.uniform, max_num_seqs=args.num_seqs, max_num_batched_tokens=8192,
                          max_model_len=num_tokens + 600, num_gpu_blocks_override=num_blocks)
    random = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)
    for length in random.integers(8, 512, args.num_seqs):
        serving.add(random.integers(100, serving.tokenizer.vocab_size - 50, length).tolist(), params)
    scheduler = serving.engine.scheduler
    while scheduler.waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        serving.engine.step()
    return serving


def _now() -> np.ndarray:
    return np.array((time.perf_counter(), time.thread_time()))


def _statistics(times: np.ndarray) -> dict[str, dict[str, float]]:
    return {part: {"median": float(np.median(column)), "p90": float(np.quantile(column, 0.9)),
                   "best": float(column.min())} for part, column in zip(("step", *PARTS), times.T, strict=True)}


def _print_profile(profiler: cProfile.Profile, steps: int) -> None:
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    print(f"{steps} steps under cProfile (which makes small functions look slower than they are):")
    print("\n".join(line for line in text.getvalue().splitlines() if line.strip()))


if __name__ == "__main__":
    main()
