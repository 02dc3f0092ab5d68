"""From sampled tokens to what the caller sees: text, stops, log-probabilities, times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.engine.logprobs import PromptLogprobs, SampledLogprobs
from jaxserve.request import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from jaxserve.text import IncrementalDetokenizer, StopChecker, Tokenizer


@dataclass(eq=False)
class RequestGroup:
    """A caller's request: a prompt and its n completions.

    `deadline_s`: seconds after its arrival at which it ends, finished or not.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_unfinished: int = 0
    deadline_s: float | None = None

    def on_finish(self, completion: Completion) -> list[RequestOutput]:
        """What the caller gets when one completion has ended: all together if it does not stream."""
        if completion.streams:
            return [self.output([completion.output()])]
        return [] if self.num_unfinished else [self.output([each.output() for each in self.completions])]

    def take_back(self, output: RequestOutput) -> list[Completion]:
        """This will not reach the caller: what was new in it is new again. Returns whose it was."""
        for told in output.outputs:
            self.completions[told.index].untell(told)
        return [self.completions[told.index] for told in output.outputs]

    def output(self, completions: Sequence[CompletionOutput]) -> RequestOutput:
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, list(completions),
                             finished=self.num_unfinished == 0, metrics=self.metrics,
                             prompt_logprobs=self.prompt_logprobs,
                             num_cached_tokens=self.completions[0].request.num_cached_tokens)


class Completion:
    """One completion in the making.

    Plain ones (nothing to stream, no stop strings) are decoded once, when they end: the loop only appends their
    tokens. All others pass through the detokenizer token by token.
    """

    def __init__(self, request: Request, group: RequestGroup, index: int, tokenizer: Tokenizer | None):
        params = request.params
        self.request, self.group, self.index = request, group, index
        self.streams = params.output_kind is not RequestOutputKind.FINAL_ONLY
        self.logprobs = None if params.logprobs is None else SampledLogprobs(
            params.logprobs, tokenizer, request.prompt_token_ids)
        self.prompt_logprobs = (
            None if params.prompt_logprobs is None or index else
            PromptLogprobs(params.prompt_logprobs, request.prompt_token_ids, tokenizer))
        self.detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self.detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=request.prompt_token_ids,
                spaces_between_special_tokens=params.spaces_between_special_tokens)
        self.stops: StopChecker | None = None
        if params.stop and self.detokenizer is not None:
            self.stops = StopChecker(params.stop, params.include_stop_str_in_output, params.min_tokens)
        self.is_plain = not self.streams and self.stops is None
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.last_token_time_s: float | None = None
        self._num_tokens_sent = self._num_chars_sent = 0

    def take(self, token_id: int) -> None:
        """Adds a token; sets `finish_reason` if it is the last one."""
        request = self.request
        request.append(token_id)
        if request.guide is not None:
            request.guide.advance(token_id)
        if token_id in request.stop_ids and len(request.output_token_ids) >= request.params.min_tokens:
            self._stop_at(token_id)
            return
        if not self.is_plain and self.detokenizer is not None:
            delta = self.detokenizer.append(token_id)
            if self.stops is not None:
                delta = self.stops.feed(delta, self.detokenizer.pending)
                if self.stops.matched is not None:
                    self.finish_reason, self.stop_reason = "stop", self.stops.matched
            self.text += delta
        if self.finish_reason is None and request.num_tokens >= request.max_total_tokens:
            self.finish_reason = "length"

    def finish(self) -> None:
        """Releases the text that was still withheld. Call once, when `finish_reason` is set."""
        if self.detokenizer is None or self.finish_reason is None:
            return
        if self.is_plain:
            ends_with_stop = self.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
            token_ids = self.request.output_token_ids
            self.detokenizer.extend(token_ids[:-1] if ends_with_stop else token_ids)
            self.detokenizer.finish()
            self.text = self.detokenizer.text
        else:
            tail = self.detokenizer.finish()
            self.text += self.stops.finish(tail) if self.stops is not None else tail
            if self.stops is not None and self.stops.matched is not None:  # perhaps only by the tail
                self.finish_reason, self.stop_reason = "stop", self.stops.matched

    def _stop_at(self, token_id: int) -> None:
        """The last token is an end token: part of the token ids, but not of the text unless asked for."""
        params = self.request.params
        self.finish_reason = "stop"
        self.stop_reason = token_id if token_id in (params.stop_token_ids or ()) else None
        if params.include_stop_str_in_output and not self.is_plain and self.detokenizer is not None:
            delta = self.detokenizer.append(token_id)
            self.text += self.stops.feed(delta) if self.stops is not None else delta

    def untell(self, told: CompletionOutput) -> None:
        """Counts what an output brought as not sent (with DELTA: it held only what was new)."""
        if self.request.params.output_kind is RequestOutputKind.DELTA:
            self._num_tokens_sent -= len(told.token_ids)
            self._num_chars_sent -= len(told.text)

    def output(self) -> CompletionOutput:
        """What the caller gets now: all, or with DELTA what is new since the last call."""
        delta = self.request.params.output_kind is RequestOutputKind.DELTA
        first_token, first_char = (self._num_tokens_sent, self._num_chars_sent) if delta else (0, 0)
        token_ids = self.request.output_token_ids
        self._num_tokens_sent, self._num_chars_sent = len(token_ids), len(self.text)
        is_end = self.finish_reason is not None
        logprobs = None if self.logprobs is None else self.logprobs.since(first_token, is_end=is_end)
        return CompletionOutput(
            self.index, self.text[first_char:], token_ids[first_token:],
            None if self.logprobs is None else self.logprobs.cumulative, logprobs, self.finish_reason, self.stop_reason)
