"""What a call of schedule() costs, by the number of requests that run and that wait."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from bench import report
from bench.simulation.clock import PromptIds
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.scheduler import Scheduler

RUNNING = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WAITING = (0, 10, 100, 1_000, 10_000, 100_000)
FIXED_WAITING, FIXED_RUNNING = 1_000, 256

_BLOCK_SIZE = 16
_PARAMS = SamplingParams()


@dataclass(frozen=True)
class Line:
    """Least squares of the relative errors, because sizes grow geometrically.

    Attributes:
      slope_s, intercept_s: seconds per request, and without any.
      r_squared: of the seconds.
      worst: largest relative distance of a point from the line.
    """

    slope_s: float
    intercept_s: float
    r_squared: float
    worst: float


def line_through(seconds: Mapping[int, float]) -> Line:
    x, y = np.array(list(seconds), np.float64), np.array(list(seconds.values()))
    slope_s, intercept_s = np.polyfit(x, y, 1, w=1 / y)
    errors = y - (slope_s * x + intercept_s)
    r_squared = 1 - (errors**2).sum() / ((y - y.mean()) ** 2).sum()
    return Line(float(slope_s), float(intercept_s), float(r_squared), float(abs(errors / y).max()))


class Load:
    """A scheduler whose running requests all decode, with all slots taken."""

    def __init__(self, running: int, waiting: int, num_calls: int):
        longest = 2 * _BLOCK_SIZE + num_calls + 1
        blocks_per_seq = -(-longest // _BLOCK_SIZE)
        self.scheduler = Scheduler(
            num_blocks=running * blocks_per_seq + 1, block_size=_BLOCK_SIZE, max_num_seqs=running,
            max_num_batched_tokens=running * longest, max_blocks_per_seq=blocks_per_seq, enable_prefix_caching=True)
        self.times_s: list[float] = []
        for index in range(running + waiting):
            # Lengths differ, so that in every step as many requests come to the end of a block.
            prompt: Any = PromptIds(index, _BLOCK_SIZE + index % _BLOCK_SIZE)
            self.scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, params=_PARAMS,
                                       max_total_tokens=1 << 30))
        self.call()
        self.times_s.clear()

    def call(self) -> None:
        start = time.thread_time()  # not lengthened by other processes
        plan = self.scheduler.schedule()
        self.times_s.append(time.thread_time() - start)
        for request in plan.rows():
            request.num_inflight -= 1
            request.append(0)


def measure(sizes: Sequence[tuple[int, int]], num_calls: int) -> list[float]:
    """Median processor seconds of a call for each (running, waiting).

    Sizes take turns, so that a slow spell of the machine hits all; four calls each, so that most find warm caches.
    """
    loads = [Load(running, waiting, num_calls) for running, waiting in sizes]
    for _ in range(num_calls // 4):
        for load in loads:
            for _ in range(4):
                load.call()
    return [median(load.times_s) for load in loads]


def fit(num_calls: int = 80) -> dict[str, Any]:
    """Measures and prints both series with their lines."""
    running = dict(zip(RUNNING, measure([(size, FIXED_WAITING) for size in RUNNING], num_calls), strict=True))
    waiting = dict(zip(WAITING, measure([(FIXED_RUNNING, size) for size in WAITING], num_calls), strict=True))
    found = {"running": (running, line_through(running)), "waiting": (waiting, line_through(waiting))}
    for name, fixed in (("running", f"{FIXED_WAITING:,} waiting"), ("waiting", f"{FIXED_RUNNING} running")):
        seconds, line = found[name]
        report.show(f"processor time of one call of schedule(), {fixed}", [name, "µs", "line, µs"], [
            [f"{size:,}", 1e6 * taken, 1e6 * (line.intercept_s + line.slope_s * size)]
            for size, taken in seconds.items()], [
                f"{1e9 * line.slope_s:,.2f} ns for each {name} request, plus {1e6 * line.intercept_s:,.1f} µs; "
                f"R² {line.r_squared:.4f}, at most {100 * line.worst:.0f} % off the line"])
    return {name: {"seconds": seconds, "slope_s": line.slope_s, "intercept_s": line.intercept_s,
                   "r_squared": line.r_squared, "worst": line.worst} for name, (seconds, line) in found.items()}
