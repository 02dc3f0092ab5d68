"""The loop of the engine without its device: schedule, let time pass, hand out tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from bench.simulation.meters import Histogram, Occupancy
from bench.simulation.trace import Trace
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler

_PARAMS = SamplingParams()
_MOST_HANDED_OVER = 8192


class PromptIds(Sequence[int]):
    """Token ids that take no room.

    The first `num_shared` are those of every prompt; the next one is this prompt's `own` id, so that no two share more.
    """

    __slots__ = ("_length", "_num_shared", "_own")

    def __init__(self, own: int, length: int, num_shared: int = 0):
        self._own, self._length, self._num_shared = -1 - own, length, num_shared

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any:
        found = range(self._length)[index]
        if isinstance(found, int):
            return self._own if found == self._num_shared else found
        return [self._own if i == self._num_shared else i for i in found]


@dataclass(eq=False, slots=True)
class SimulatedRequest(Request):
    """Attributes:
      index: in the trace.
      last_token_s: when its newest token came; NaN before the first.
    """

    index: int = 0
    last_token_s: float = math.nan


class Simulation:
    """Runs a trace through a scheduler in virtual time.

    A step is planned when the one before has ended. (The engine plans it earlier, which hides the host's work and frees
    what a stop leaves one step later; both are small against a step.)

    Requests exist from when they are handed to the scheduler until they end. While `_MOST_HANDED_OVER` wait there, more
    that have arrived wait outside: first come, first served, so it makes no difference but for memory.

    Attributes:
      now_s: virtual time.
      queue_s, first_token_s, end_to_end_s: float32 [requests], from arrival to the start of its first step, to its
        first token, and to its last; NaN until then.
      between_tokens_s: of every token but the first of each request, since the one before.
      schedule_s: real processor time of each call of schedule(), which other processes do not lengthen.
    """

    def __init__(self, scheduler: Scheduler, trace: Trace, step_seconds: Callable[[StepPlan], float], *,
                 max_num_seqs: int):
        self.scheduler, self.trace, self.step_seconds = scheduler, trace, step_seconds
        self.now_s = 0.0
        self.queue_s, self.first_token_s, self.end_to_end_s = (
            np.full(len(trace), np.nan, np.float32) for _ in range(3))
        self.between_tokens_s = Histogram()
        self.schedule_s = Histogram()
        self.occupancy = Occupancy(scheduler, max_num_seqs)
        self.num_steps = self.num_finished = self.num_output_tokens = self.num_computed_tokens = 0
        self._num_handed_over = 0
        self._most_waiting = max(_MOST_HANDED_OVER, 2 * max_num_seqs)

    def run(self, on_finish: Callable[[int], Any] = lambda count: None) -> None:
        """Until every request has ended.

        Args:
          on_finish: called after a step with the number of requests that it ended.
        """
        while (before := self.num_finished) < len(self.trace):
            self.step()
            on_finish(self.num_finished - before)

    def step(self) -> None:
        """One step, or the wait for the next arrival when there is nothing to do."""
        self._hand_over()
        start = time.thread_time()
        plan = self.scheduler.schedule()
        self.schedule_s.add(time.thread_time() - start)
        if plan.is_empty:
            if self.scheduler.has_requests and not plan.preempted:
                raise RuntimeError(f"{len(self.scheduler.running)} running and {len(self.scheduler.waiting)} waiting "
                                   "requests, and nothing to compute")
            if not self.scheduler.has_requests:
                self.now_s = float(self.trace.arrival_s[self._num_handed_over])
            return
        began_s, duration_s = self.now_s, self.step_seconds(plan)
        self.now_s = began_s + duration_s
        arrived = int(np.searchsorted(self.trace.arrival_s, began_s, side="right"))
        self.occupancy.add(plan, began_s, duration_s, num_outside=arrived - self._num_handed_over)
        self.num_steps += 1
        self.num_computed_tokens += plan.num_tokens
        for request in self._hand_out(plan, began_s):
            self._finish(request)

    def _hand_over(self) -> None:
        """Arrived requests to the scheduler."""
        trace, scheduler = self.trace, self.scheduler
        while (index := self._num_handed_over) < len(trace) and len(scheduler.waiting) < self._most_waiting:
            arrival_s = float(trace.arrival_s[index])
            if arrival_s > self.now_s:
                break
            num_prompt = int(trace.prompt_tokens[index])
            prompt: Any = PromptIds(index, num_prompt, trace.num_shared)
            scheduler.add(SimulatedRequest(
                request_id=str(index), prompt_token_ids=prompt, params=_PARAMS, arrival_time_s=arrival_s,
                max_total_tokens=num_prompt + int(trace.output_tokens[index]), index=index))
            self._num_handed_over += 1

    def _hand_out(self, plan: StepPlan, began_s: float) -> list[SimulatedRequest]:
        """Gives every row that sampled its token; returns the requests whose last it was."""
        now_s, num_usual = self.now_s, 0
        ended: list[SimulatedRequest] = []
        chunked: list[Any] = [chunk.request for chunk in plan.chunks]
        for request in chunked:
            if math.isnan(self.queue_s[request.index]):
                self.queue_s[request.index] = began_s - request.arrival_time_s
        sampled: list[Any] = plan.decodes + [chunk.request for chunk in plan.chunks if chunk.samples]
        for request in sampled:
            request.num_inflight -= 1
            request.append(0)
            if request.last_token_s == began_s:
                num_usual += 1  # it got a token from the step before too, as nearly all do
            elif math.isnan(request.last_token_s):
                self.first_token_s[request.index] = now_s - request.arrival_time_s
            else:
                self.between_tokens_s.add(now_s - request.last_token_s)
            request.last_token_s = now_s
            if request.num_tokens == request.max_total_tokens:
                ended.append(request)
        if num_usual:
            self.between_tokens_s.add(now_s - began_s, num_usual)
        self.num_output_tokens += len(sampled)
        return ended

    def _finish(self, request: SimulatedRequest) -> None:
        self.scheduler.finish(request)
        self.end_to_end_s[request.index] = self.now_s - request.arrival_time_s
        self.num_finished += 1
