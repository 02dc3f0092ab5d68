"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.logprobs import HostCopy
from jaxserve.engine.outputs import Completion, RequestGroup
from jaxserve.errors import InvalidInputError, QueueFullError
from jaxserve.request import Request, RequestOutput, RequestStatus
from jaxserve.runner.model_runner import Dispatched, ModelRunner
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.text import Tokenizer


@dataclass
class EngineStats:
    """Counters since the engine was made; see also the gauges of `Engine`."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_timed_out: int = 0


class Engine:
    """Scheduler, runner and outputs as one loop; knows neither files nor threads. Not thread-safe.

    With `overlap` a step is planned and dispatched before the tokens of the one before are read (see `Scheduler`).
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, tokenizer: Tokenizer | None, *, overlap: bool,
                 max_waiting_requests: int | None = None, queue_timeout_s: float | None = None):
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.stats = EngineStats()
        self._overlap = overlap
        self._max_waiting = max_waiting_requests
        self._deadlines = Deadlines(queue_timeout_s)
        self._ahead: Dispatched | None = None
        self._postponed: StepPlan | None = None
        self._undelivered: list[RequestOutput] = []
        self._completions: dict[Request, Completion] = {}
        self._groups: dict[str, RequestGroup] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups or self._undelivered) or self._ahead is not None

    def add(self, group: RequestGroup, requests: Sequence[Request], *, bounded: bool = True) -> None:
        """Queues the completions of one caller's request.

        Args:
          bounded: refuse it if too many wait; a caller who waits for all of its own requests need not be refused.

        Raises:
          InvalidInputError: it alone would be too many.
          QueueFullError: as many wait as may; nothing was queued.
        """
        if bounded and self._max_waiting is not None:
            self._check_room(len(requests), self._max_waiting)
        self._groups[group.request_id] = group
        group.num_unfinished = len(requests)
        self._deadlines.add(group)
        for index, request in enumerate(requests):
            completion = Completion(request, group, index, self.tokenizer)
            group.completions.append(completion)
            self._completions[request] = completion
            self.scheduler.add(request)
        self.stats.num_prompt_tokens += len(group.prompt_token_ids)

    def _check_room(self, count: int, most: int) -> None:
        """Those that the next step can start do not count as waiting."""
        scheduler = self.scheduler
        if count > most + len(scheduler.block_tables):
            raise InvalidInputError("n", count, f"at most max_num_seqs + max_waiting_requests, "
                                                f"{most + len(scheduler.block_tables)}")
        if len(scheduler.waiting) + count > most + scheduler.num_free_slots:
            raise QueueFullError(f"{len(scheduler.waiting)} requests wait, max_waiting_requests is {most}; try again "
                                 "later")

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request now; returns what it had so far, or None if it is unknown or already finished."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        self.stats.num_aborted += 1
        return self._end(group)

    def _end(self, group: RequestGroup) -> RequestOutput:
        """Ends what still runs. Completions that stream and had ended before are left out: their callers know."""
        to_tell = set()
        for completion in group.completions:
            if completion.finish_reason is None:
                completion.finish_reason = "abort"
                completion.finish()
                self._retire(completion)
                to_tell.add(completion)
        # What `drain` read but nobody has got must not come after the end: it comes with it.
        mine = [output for output in self._undelivered if output.request_id == group.request_id]
        self._undelivered = [output for output in self._undelivered if output.request_id != group.request_id]
        to_tell |= {completion for output in mine for completion in group.take_back(output)}
        return group.output([completion.output() for completion in group.completions
                             if completion in to_tell or not completion.streams])

    def step(self) -> list[RequestOutput]:
        """Plans and dispatches a step, then reads the one before it (without overlap: this one)."""
        for group, error in self._deadlines.late(time.monotonic()):
            self.stats.num_timed_out += 1
            last = replace(self._end(group), error=error)
            self._undelivered.append(last)
        with jax.profiler.TraceAnnotation("schedule"):
            plan = self._next_plan()
        if self._ahead is not None and not plan.is_empty and not self.runner.is_compiled(plan):
            # Tokens that are there already do not wait for the compiler: the plan is dispatched by the next call.
            self._postponed = plan
            self.drain()
            plan = StepPlan()
        with jax.profiler.TraceAnnotation("step"):
            dispatched = None if plan.is_empty else self._dispatch(plan)
        if self._overlap:
            dispatched, self._ahead = self._ahead, dispatched
        outputs, self._undelivered = self._undelivered, []
        return outputs if dispatched is None else outputs + self._read(dispatched)

    def drain(self) -> None:
        """Reads the step that is on its way, if any; the next `step` returns what came of it."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._undelivered += self._read(ahead)

    def close(self) -> None:
        self.runner.close()

    def update_weights(self, params: Mapping[str, jax.Array]) -> None:
        """Continues with other weights. What the cache holds was computed with the old ones, so running requests
        compute their tokens again."""
        self.drain()
        if self._postponed is not None and not (plan := self._next_plan()).is_empty:
            self._ahead = self._dispatch(plan)
            self.drain()
        self.scheduler.recompute_all()
        self.runner.set_params(params)
        self.runner.find_kv_scales()

    def _next_plan(self) -> StepPlan:
        plan, self._postponed = self._postponed, None
        if plan is None:
            return self.scheduler.schedule()
        self.scheduler.revise(plan)
        return plan

    def _dispatch(self, plan: StepPlan) -> Dispatched:
        for chunk in plan.chunks:
            metrics = self._completions[chunk.request].group.metrics
            if metrics.first_scheduled_time_s is None:
                metrics.first_scheduled_time_s = time.monotonic()
        return self.runner.dispatch(plan)

    def _read(self, step: Dispatched) -> list[RequestOutput]:
        """Waits for a step's tokens and hands them to their completions."""
        with jax.profiler.TraceAnnotation("outputs"):
            token_ids = np.asarray(step.outputs.token_ids).tolist()
            now = time.monotonic()
            self.stats.num_steps += 1
            sampled = HostCopy(step.outputs.logprobs)
            outputs: list[RequestOutput] = []
            for row, request in enumerate(step.plan.decodes):
                self._take(request, token_ids[row], row, sampled, now, outputs)
            if step.plan.chunks:
                self._read_prompt_logprobs(step)
                for row, chunk in enumerate(step.plan.chunks, start=len(step.plan.decodes)):
                    if chunk.samples:
                        self._take(chunk.request, token_ids[row], row, sampled, now, outputs)
            return outputs

    def _take(self, request: Request, token_id: int, row: int, logprobs: HostCopy, now: float,
              outputs: list[RequestOutput]) -> None:
        request.num_inflight -= 1
        if request.status is RequestStatus.FINISHED:
            return  # it ended while this token was on its way
        completion = self._completions[request]
        completion.take(token_id)
        if completion.logprobs is not None:
            completion.logprobs.add(token_id, row, logprobs.get())
        metrics = completion.group.metrics
        if metrics.first_token_time_s is None:
            metrics.first_token_time_s = now
        self.stats.num_generated_tokens += 1
        if completion.finish_reason is not None:
            metrics.last_token_time_s = now
            completion.finish()
            self._retire(completion)
            self.stats.num_finished += completion.group.num_unfinished == 0
            outputs += completion.group.on_finish(completion)
        elif completion.streams:
            metrics.last_token_time_s = now
            outputs.append(completion.group.output([completion.output()]))

    def _read_prompt_logprobs(self, step: Dispatched) -> None:
        arrays = HostCopy(step.outputs.prompt_logprobs)
        row = len(step.plan.decodes)
        for chunk in step.plan.chunks:
            completion = self._completions.get(chunk.request)
            if completion is not None and completion.prompt_logprobs is not None:
                completion.prompt_logprobs.add(chunk.start, chunk.num_tokens, row, arrays.get())
                if completion.prompt_logprobs.is_complete:
                    completion.group.prompt_logprobs = completion.prompt_logprobs.positions
            row += chunk.num_tokens

    def _retire(self, completion: Completion) -> None:
        """Takes a completion whose finish_reason is set out of the engine."""
        self.scheduler.finish(completion.request)
        del self._completions[completion.request]
        group = completion.group
        group.metrics.num_preemptions += completion.request.num_preemptions
        group.num_unfinished -= 1
        if not group.num_unfinished:
            del self._groups[group.request_id]
