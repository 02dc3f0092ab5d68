"""From timelines to figures, by the definitions and under the names of vLLM's benchmark.

    start        arrivals                      end
      |............|.......|.......|.......|....|
      |--- TTFT ---|--ITL--|--ITL--|--ITL--|    |
      |----------------- E2EL ------------------|        TPOT = (E2EL - TTFT) / (output tokens - 1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxserve.errors import InvalidInputError
from jaxserve.server.bench.client import Timeline

LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token after the first",
             "itl": "Between two arrivals of text", "e2el": "End to end"}


@dataclass(frozen=True)
class Figures:
    """
    Attributes:
      duration: seconds from the first request's start to the last one's end.
      errors: kind of failure -> requests.
      latencies: of `LATENCIES`, in ms; of complete answers only.
    """

    duration: float
    completed: int
    errors: dict[str, int]
    total_input_tokens: int
    total_output_tokens: int
    latencies: dict[str, list[float]]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration if self.duration else 0.0

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration if self.duration else 0.0

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration if self.duration else 0.0

    def as_json(self, percentiles: Sequence[float]) -> dict[str, object]:
        """Names as in the files of `vllm bench serve`."""
        found: dict[str, object] = {
            "duration": self.duration, "completed": self.completed, "failed": sum(self.errors.values()),
            "errors": self.errors, "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens, "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput, "total_token_throughput": self.total_token_throughput}
        for name, values in self.latencies.items():
            found[f"mean_{name}_ms"] = sum(values) / len(values) if values else None
            found[f"median_{name}_ms"] = percentile(values, 50)
            for point in percentiles:
                found[f"p{point:g}_{name}_ms"] = percentile(values, point)
        return found


def figures(timelines: Sequence[Timeline]) -> Figures:
    """Of all requests of a run."""
    answered = [timeline for timeline in timelines if timeline.error is None]
    latencies: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for timeline in answered:
        first, whole = timeline.arrivals[0] - timeline.start, timeline.end - timeline.start
        latencies["ttft"].append(first * 1e3)
        latencies["e2el"].append(whole * 1e3)
        latencies["itl"] += [(after - before) * 1e3 for before, after in pairwise(timeline.arrivals)]
        if timeline.num_output_tokens > 1:
            latencies["tpot"].append((whole - first) / (timeline.num_output_tokens - 1) * 1e3)
    return Figures(
        duration=max((one.end for one in timelines), default=0.0) - min((one.start for one in timelines), default=0.0),
        completed=len(answered),
        errors=dict(Counter(timeline.error for timeline in timelines if timeline.error is not None)),
        total_input_tokens=sum(timeline.num_prompt_tokens for timeline in answered),
        total_output_tokens=sum(timeline.num_output_tokens for timeline in answered),
        latencies=latencies)


def percentile(values: Sequence[float], point: float) -> float | None:
    """With straight lines between values; None of nothing."""
    if not 0 <= point <= 100:
        raise InvalidInputError("metric_percentiles", point, "between 0 and 100")
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * point / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
