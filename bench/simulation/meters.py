"""What a simulation keeps of what it sees: all of a fixed size, however long it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler

PERCENTILES = (50, 90, 99)


class Histogram:
    """Seconds from 100 ns to 10 million s in bins of 1%: percentiles are exact to half of that, sums are exact."""

    _LOW, _WIDTH, _NUM_BINS = 1e-7, math.log(1.01), 3240

    def __init__(self) -> None:
        self._counts = [0] * self._NUM_BINS
        self.count = 0
        self.sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        index = int(math.log(max(seconds, self._LOW) / self._LOW) / self._WIDTH)
        self._counts[min(index, self._NUM_BINS - 1)] += count
        self.count += count
        self.sum_s += seconds * count

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count

    def percentile(self, percent: float) -> float:
        """Seconds that `percent` of the values do not exceed."""
        index = int(np.searchsorted(np.cumsum(self._counts), self.count * percent / 100))
        return self._LOW * math.exp((index + 0.5) * self._WIDTH)


def summary(values: Histogram | np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles in seconds: of a histogram, or, exactly, of an array without its NaNs; None if empty."""
    names = ["mean_s", *(f"p{percent}_s" for percent in PERCENTILES)]
    if isinstance(values, Histogram):
        if not values.count:
            return dict.fromkeys(names)
        found = [values.mean_s, *(values.percentile(percent) for percent in PERCENTILES)]
    else:
        known = values[~np.isnan(values)]
        if not len(known):
            return dict.fromkeys(names)
        found = [float(known.mean(dtype=np.float64)), *np.percentile(known, PERCENTILES).tolist()]
    return dict(zip(names, found, strict=True))


@dataclass(slots=True)
class Share:
    """Integrals over virtual time, in seconds times the unit."""

    seconds: float = 0.0
    sequences: float = 0.0
    blocks: float = 0.0

    def add(self, duration_s: float, num_sequences: int, num_blocks: int) -> None:
        self.seconds += duration_s
        self.sequences += num_sequences * duration_s
        self.blocks += num_blocks * duration_s


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of a simulation.

    Attributes:
      waiting: requests that have arrived and do not run.
      block_use: share of the usable blocks that requests hold.
    """

    time_s: float
    running: int
    waiting: int
    block_use: float


class Curve:
    """At most `most` points: when there are more, every other one goes."""

    def __init__(self, most: int = 4096):
        self.points: list[Point] = []
        self._most, self._stride, self._seen = most, 1, 0

    def add(self, time_s: float, running: int, waiting: int, block_use: float) -> None:
        if self._seen % self._stride == 0:
            self.points.append(Point(time_s, running, waiting, block_use))
            if len(self.points) == self._most:
                self.points, self._stride = self.points[::2], 2 * self._stride
        self._seen += 1

    def columns(self) -> dict[str, list[float]]:
        return {field.name: [getattr(point, field.name) for point in self.points] for field in fields(Point)}


class Occupancy:
    """How full batch and cache are while steps run, weighted by their duration.

    Attributes:
      all: over all steps.
      saturated: over steps that left a request waiting although the token budget was not used up: slots or blocks were
        all taken. (Without the condition on the budget the filling of an empty engine would count.)
    """

    WASTE_EVERY = 16
    """Steps between two looks at every running request."""

    def __init__(self, scheduler: Scheduler, max_num_seqs: int):
        self.scheduler, self.max_num_seqs = scheduler, max_num_seqs
        self.usable_blocks = scheduler.pool.num_blocks - 1
        self.all, self.saturated, self.curve = Share(), Share(), Curve()
        self._slots = self._tokens = self._num_steps = 0

    def add(self, plan: StepPlan, began_s: float, duration_s: float, *, num_outside: int) -> None:
        """Takes note of a step that is running.

        Args:
          num_outside: requests that have arrived and that the scheduler does not know yet.
        """
        scheduler = self.scheduler
        running, used, waiting = len(scheduler.running), scheduler.pool.num_used, len(scheduler.waiting)
        self.all.add(duration_s, running, used)
        if waiting and plan.num_tokens < scheduler.max_num_batched_tokens:
            self.saturated.add(duration_s, running, used)
        self.curve.add(began_s, running, waiting + num_outside, used / self.usable_blocks)
        if self._num_steps % self.WASTE_EVERY == 0:
            self._slots += scheduler.block_size * sum(len(request.block_ids) for request in scheduler.running)
            self._tokens += sum(request.num_computed_tokens for request in scheduler.running)
        self._num_steps += 1

    @property
    def waste(self) -> float:
        """Share of the slots in held blocks that hold no token, nor get one in the running step."""
        return 1 - self._tokens / self._slots if self._slots else 0.0

    def shares(self, share: Share) -> dict[str, float | None]:
        """Means over time, of the batch and of the blocks; None without time."""
        whole = {"batch_occupancy": share.sequences / self.max_num_seqs,
                 "block_utilisation": share.blocks / self.usable_blocks}
        return {"seconds": share.seconds} | {
            name: integral / share.seconds if share.seconds else None for name, integral in whole.items()}
