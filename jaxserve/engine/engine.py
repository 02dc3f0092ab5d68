"""The engine: requests in, one step at a time, outputs out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import jax
import numpy as np

from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.logprobs import HostCopy
from jaxserve.engine.metrics import EngineHistograms, EngineSnapshot
from jaxserve.engine.outputs import Completion, RequestGroup
from jaxserve.errors import InvalidInputError, QueueFullError
from jaxserve.request import FinishReason, Request, RequestOutput, RequestStatus
from jaxserve.runner.embedder import Batch, Embedder, Pooling
from jaxserve.runner.model_runner import Dispatched, ModelRunner
from jaxserve.sampling.rows import needs_row
from jaxserve.scheduling.limits import BatchDelay
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.report import MemoryProfiler, MemoryReport, memory_report
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.text import Tokenizer


@dataclass
class EngineStats:
    """Counters since the engine was made; see also `Engine.snapshot`. Refused: because the queue was full. Draft
    tokens: guesses that were checked, see `scheduling.ngram`; accepted: that held."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_timed_out: int = 0
    num_refused: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finish_reasons: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(get_args(FinishReason), 0)))
    histograms: EngineHistograms = field(default_factory=EngineHistograms)


class Engine:
    """Scheduler, runner and outputs as one loop; knows neither files nor threads. Not thread-safe.

    With `overlap` a step is planned and dispatched before the tokens of the one before are read (see `Scheduler`).
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, tokenizer: Tokenizer | None, *, overlap: bool,
                 max_waiting_requests: int | None = None, queue_timeout_s: float | None = None,
                 batch_delay: BatchDelay | None = None, memory_profiler: MemoryProfiler | None = None):
        self.scheduler, self.runner, self.tokenizer = scheduler, runner, tokenizer
        self.stats = EngineStats()
        self._overlap = overlap
        self._max_waiting = max_waiting_requests
        self._deadlines = Deadlines(queue_timeout_s)
        self._batch_delay, self._memory_profiler = batch_delay, memory_profiler
        self._ahead: Dispatched | None = None
        self._postponed: StepPlan | None = None
        self._undelivered: list[RequestOutput] = []
        self._completions: dict[Request, Completion] = {}
        self._groups: dict[str, RequestGroup] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups or self._undelivered) or self._ahead is not None

    def snapshot(self) -> EngineSnapshot:
        """For dashboards; the one method that another thread may call: it reads counters and lengths, no lists."""
        scheduler, stats = self.scheduler, self.stats
        pool, prefixes = scheduler.pool, scheduler.prefixes.stats
        return EngineSnapshot(
            num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
            kv_cache_usage=pool.num_used / (pool.num_blocks - 1), num_preemptions=scheduler.num_preemptions,
            prefix_queries=prefixes.queries, prefix_hits=prefixes.hits, num_prompt_tokens=stats.num_prompt_tokens,
            num_generated_tokens=stats.num_generated_tokens, num_steps=stats.num_steps,
            num_timed_out=stats.num_timed_out, num_refused=stats.num_refused,
            num_draft_tokens=stats.num_draft_tokens, num_accepted_tokens=stats.num_accepted_tokens,
            finish_reasons=Counter(stats.finish_reasons), histograms=stats.histograms)

    def memory_report(self) -> MemoryReport:
        """What the KV cache's blocks are used for at this moment."""
        mover = getattr(self.runner, "mover", None)
        return memory_report(self.scheduler, self._memory_profiler,
                             compression_ratio=mover.host.compression_ratio if mover is not None else None)

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
            # Rows count one token a step, and a guide knows what may follow the last one.
            if self.scheduler.drafter is not None and request.guide is None and not needs_row(request.params):
                request.speculates = request.needs_host_tokens = True
            self.scheduler.add(request)
        self.stats.num_prompt_tokens += len(group.prompt_token_ids)

    def _check_room(self, count: int, most: int) -> None:
        """Those that the next step can start do not count as waiting."""
        scheduler = self.scheduler
        if count > most + len(scheduler.block_tables):
            raise InvalidInputError("n", count, f"at most max_num_seqs + max_waiting_requests, "
                                                f"{most + len(scheduler.block_tables)}")
        if len(scheduler.waiting) + count > most + scheduler.num_free_slots:
            self.stats.num_refused += 1
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

    @cached_property
    def embedder(self) -> Embedder:
        return Embedder(self.runner.blueprint)

    def embed(self, batch: Batch, pooling: Pooling) -> jax.Array:
        """See `Embedder.dispatch`; between two steps, with the weights in use."""
        pooled = self.embedder.dispatch(list(self.runner.params().values()), batch, pooling)
        self.stats.num_prompt_tokens += sum(map(len, batch))
        return pooled

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
        if plan is not None:
            self.scheduler.revise(plan)
            return plan
        if self._batch_delay is not None and self._holds_batch(self._batch_delay):
            return StepPlan()
        plan = self.scheduler.schedule()
        if plan.swap_out or plan.swap_in:
            self.runner.move(plan)
        if self._memory_profiler is not None:
            self._memory_profiler.record(self.scheduler)
        return plan

    def _holds_batch(self, delay: BatchDelay) -> bool:
        """Whether the next batch is not to start yet. Sleeps for a moment if there is nothing else to do; the loops
        around `step` see new requests between two moments."""
        left_s = delay.left_s(time.monotonic(), num_running=len(self.scheduler.running),
                              num_waiting=len(self.scheduler.waiting))
        if left_s and self._ahead is None and not self._undelivered:
            time.sleep(min(left_s, 1e-3))
        return left_s > 0

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
            self.stats.histograms.iteration_tokens_total.observe(step.plan.num_tokens)
            sampled = HostCopy(step.outputs.logprobs)
            outputs: list[RequestOutput] = []
            num_decodes = len(step.plan.decodes) - step.plan.num_drafts
            for row, request in enumerate(step.plan.decodes[:num_decodes]):
                self._take(request, token_ids[row], row, sampled, now, outputs)
            if step.plan.num_drafts:
                self._read_drafts(step.plan, token_ids, sampled, now, outputs)
            if step.plan.chunks:
                self._read_prompt_logprobs(step)
                for row, chunk in enumerate(step.plan.chunks, start=len(step.plan.decodes)):
                    if chunk.samples:
                        self._take(chunk.request, token_ids[row], row, sampled, now, outputs)
            return outputs

    def _read_drafts(self, plan: StepPlan, token_ids: list[int], logprobs: HostCopy, now: float,
                     outputs: list[RequestOutput]) -> None:
        """Takes the tokens of guesses that hold: what was drawn before a guess is the guess."""
        row = len(plan.decodes) - plan.num_drafts
        for before, request in enumerate(plan.decodes[:row]):
            if not (drafts := request.draft_token_ids):
                continue
            num_accepted, drawn = 0, token_ids[before]
            while num_accepted < len(drafts) and drawn == drafts[num_accepted] and not request.is_finished:
                drawn = token_ids[row + num_accepted]
                self._take(request, drawn, row + num_accepted, logprobs, now, outputs)
                num_accepted += 1
            row += len(drafts)
            self.stats.num_draft_tokens += len(drafts)
            self.stats.num_accepted_tokens += num_accepted
            self.scheduler.settle(request, len(drafts) - num_accepted)

    def _take(self, request: Request, token_id: int, row: int, logprobs: HostCopy, now: float,
              outputs: list[RequestOutput]) -> None:
        request.num_inflight -= 1
        if request.status is RequestStatus.FINISHED:
            return  # it ended while this token was on its way
        completion = self._completions[request]
        completion.take(token_id)
        if completion.logprobs is not None:
            completion.logprobs.add(token_id, row, logprobs.get())
        metrics, histograms = completion.group.metrics, self.stats.histograms
        if metrics.first_token_time_s is None:
            metrics.first_token_time_s = now
            histograms.time_to_first_token_seconds.observe(now - metrics.arrival_time_s)
        if completion.last_token_time_s is not None:
            histograms.inter_token_latency_seconds.observe(now - completion.last_token_time_s)
        completion.last_token_time_s = now
        self.stats.num_generated_tokens += 1
        if completion.finish_reason == "stop" and request.guide is not None and request.guide.failure is not None:
            completion.finish_reason = None  # no text of the form, so no answer
            outputs.append(replace(self._end(completion.group), error=request.guide.failure))
        elif completion.finish_reason is not None:
            metrics.last_token_time_s = now
            completion.finish()
            histograms.finished(request, metrics)
            self._retire(completion)
            if completion.group.num_unfinished == 0:
                self.stats.num_finished += 1
                histograms.request_params_n.observe(completion.group.params.n)
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
        self.stats.finish_reasons[completion.finish_reason or "error"] += 1
        self.scheduler.finish(completion.request)
        del self._completions[completion.request]
        group = completion.group
        group.metrics.num_preemptions += completion.request.num_preemptions
        group.num_unfinished -= 1
        if not group.num_unfinished:
            del self._groups[group.request_id]
