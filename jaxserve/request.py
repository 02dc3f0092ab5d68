"""What goes into the engine and what comes out: sampling parameters, requests and their outputs."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal

from jaxserve.errors import InvalidInputError
from jaxserve.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
"""Most alternatives per position that `logprobs` and `prompt_logprobs` may ask for (the device returns this many)."""

MAX_SEED = 2**63 - 1

FinishReason = Literal["stop", "length", "abort", "error"]


def _require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise InvalidInputError(name, value, allowed)


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy integers too


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


class RequestOutputKind(enum.Enum):
    """What a request's outputs carry: all so far, only what is new, or nothing before the end (vLLM's names)."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names, meanings and defaults are vLLM's.

    Attributes:
      n: number of independent completions of the prompt.
      temperature: 0 is greedy; logits are divided by it otherwise. Below 1e-5 it counts as 0.
      top_p, top_k, min_p: restrict sampling to the smallest set with this probability mass; to this many tokens
        (0 or -1: all); to tokens at least `min_p` times as likely as the likeliest.
      seed: same seed, same tokens, whatever else is in the batch. None or -1: a fresh one.
      max_tokens: most tokens to generate; None: as many as the context allows.
      min_tokens: no EOS, stop token or stop string ends the output before this many tokens.
      stop, stop_token_ids: texts and token ids that end the output. A matched text is cut off unless
        `include_stop_str_in_output`.
      ignore_eos: generate on past the model's own end tokens (`stop_token_ids` still stop).
      presence_penalty, frequency_penalty: subtracted for each generated token once, and once per occurrence.
      repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
      logit_bias: token id -> added to its logit, within [-100, 100].
      allowed_token_ids: only these can be chosen.
      bad_words: texts that must not be generated.
      logprobs, prompt_logprobs: how many likeliest alternatives to report per generated / prompt token, besides
        the token itself; None: none at all. Values are log-softmax of the model's raw logits.
      skip_special_tokens, spaces_between_special_tokens, detokenize: how the text is made; without `detokenize`
        outputs carry token ids only (and stop strings are refused).
      structured_outputs: the form that the output must have, see `StructuredOutputsParams`; a mapping will do. Not with
        min_tokens, allowed_token_ids or bad_words, which could forbid all that it leaves.
      output_kind: what the outputs of a stream carry; `LLM` always waits for the whole.

    Raises:
      InvalidInputError: names the field, its value and what is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, Collection) and not isinstance(value, (bytes, Mapping)))
            _require(ok and (name == "stop" or not isinstance(value, str)), name, value, "a list, or None")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
                     "spaces_between_special_tokens", "detokenize"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(isinstance(self.output_kind, RequestOutputKind), "output_kind", self.output_kind,
                 "a RequestOutputKind")
        set_ = object.__setattr__  # frozen: normalise once, here
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        set_(self, "stop", tuple(stop))
        set_(self, "stop_token_ids", () if self.stop_token_ids is None else tuple(self.stop_token_ids))
        set_(self, "bad_words", () if self.bad_words is None else tuple(self.bad_words))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.logit_bias is not None:
            set_(self, "logit_bias", _parse_logit_bias(self.logit_bias))
        set_(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        if self.seed == -1:
            set_(self, "seed", None)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        def number(name: str, low: float, high: float, allowed: str, low_open: bool = False) -> None:
            value = getattr(self, name)
            ok = _is_number(value) and low <= value <= high and not (low_open and value == low)
            _require(ok, name, value, allowed)

        def integer(name: str, low: int, allowed: str, optional: bool = False, high: int = MAX_SEED) -> None:
            value = getattr(self, name)
            ok = (optional and value is None) or (_is_int(value) and low <= value <= high)
            _require(ok, name, value, allowed)

        integer("n", 1, "an integer, at least 1")
        number("temperature", 0.0, 1e30, "a number from 0 to 1e30")
        number("top_p", 0.0, 1.0, "a number in (0, 1]", low_open=True)
        number("min_p", 0.0, 1.0, "a number in [0, 1]")
        integer("top_k", 0, "an integer, at least 1, or 0 or -1 for all")
        number("presence_penalty", -2.0, 2.0, "a number in [-2, 2]")
        number("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]")
        number("repetition_penalty", 0.0, math.inf, "a finite number above 0", low_open=True)
        integer("seed", -MAX_SEED, "a 64-bit integer or None", optional=True)
        integer("max_tokens", 1, f"an integer from 1 to {MAX_SEED}, or None", optional=True)
        integer("min_tokens", 0, "an integer, at least 0")
        logprobs = f"an integer from 0 to {MAX_LOGPROBS}, or None"
        integer("logprobs", 0, logprobs, optional=True, high=MAX_LOGPROBS)
        integer("prompt_logprobs", 0, logprobs, optional=True, high=MAX_LOGPROBS)
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens={self.max_tokens}")
        if self.is_greedy:
            _require(self.n == 1, "n", self.n, "1 when temperature is 0: greedy completions would all be the same")

    def _check_lists(self) -> None:
        for text in self.stop or ():
            _require(isinstance(text, str) and text != "", "stop", self.stop, "non-empty strings")
        _require(self.detokenize or not self.stop, "stop", self.stop, "no stop strings when detokenize is False")
        for word in self.bad_words or ():
            _require(isinstance(word, str) and word != "", "bad_words", self.bad_words, "non-empty strings")
        if self.structured_outputs is not None:
            for name in ("min_tokens", "allowed_token_ids", "bad_words"):
                _require(not getattr(self, name), name, getattr(self, name), "nothing with structured_outputs")
        for token_id in self.stop_token_ids or ():
            _require(_is_int(token_id) and token_id >= 0, "stop_token_ids", self.stop_token_ids, "token ids")
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", self.allowed_token_ids, "at least one id")
            for token_id in self.allowed_token_ids:
                _require(_is_int(token_id) and token_id >= 0, "allowed_token_ids", self.allowed_token_ids, "token ids")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens were seen before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises InvalidInputError where a token id lies outside the model's vocabulary."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                _require(0 <= token_id < vocab_size, name, token_id, f"token ids from 0 to {vocab_size - 1}")

    def for_completion(self, index: int) -> SamplingParams:
        """The parameters of the index-th of `n` completions: a single one, with its own seed."""
        if not index:
            return replace(self, n=1)
        seed = None if self.seed is None else (self.seed + index) % (MAX_SEED + 1)
        return replace(self, n=1, seed=seed, prompt_logprobs=None)


def _parse_logit_bias(bias: Any) -> dict[int, float]:
    """Keys may be integers or, as in JSON, strings of digits."""
    _require(isinstance(bias, dict), "logit_bias", bias, "a mapping of token id to bias")
    parsed = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and key.strip().isdecimal() else key
        _require(_is_int(token_id) and token_id >= 0, "logit_bias", key, "token ids as keys")
        _require(_is_number(value) and -100 <= value <= 100, "logit_bias", value, "biases in [-100, 100]")
        parsed[token_id] = float(value)
    return parsed


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Request:
    """One sequence in the engine, as the scheduler sees it (a prompt with n > 1 becomes n requests).

    Token positions, with everything to the left of a mark already true:

        | prompt_token_ids        | output_token_ids  | in flight |
        0 ........ num_computed_tokens ............ num_tokens .. num_tokens + num_inflight
                   (KV in the cache or being written) (known on the host)   (sampled on the device, not yet read)

    Attributes:
      priority, business_value: see `scheduling.policy`.
      max_total_tokens: prompt plus output may not grow past this.
      seed: of its random draws, 64 bits.
      stop_ids: token ids that end it once `min_tokens` are out.
      bad_words_ids: the bad words as token ids.
      num_tokens: tokens known on the host (counted here: the hot path asks for it several times a step).
      num_inflight: sampled tokens that the host has not seen yet (at most 1 when a step is planned, and one more for
        each guess).
      slot: row of the per-request arrays on host and device while running, else None.
      guide: of the form that its output must have, see `text.guides`.
      speculates: its next tokens may be guessed, see `scheduling.ngram`.
      draft_token_ids: guesses that the step on its way checks; they follow the known tokens.
      needs_host_tokens: a step may not be scheduled while a token is in flight (its logits depend on it on the host).
      cache_salt: only requests with the same one share cached prefixes.
      num_cached_tokens: that were found in the prefix cache when it first ran.
      block_names: of its full blocks, see `PrefixCache`.
      num_published_blocks: how many of those that it holds have their names.
      host_block_ids: while it waits after it was swapped out: host blocks that hold its computed tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    arrival_time_s: float = 0.0
    priority: int = 0
    business_value: float = 0.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    needs_host_tokens: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_tokens: int = field(init=False)
    num_inflight: int = 0
    slot: int | None = None
    num_preemptions: int = 0
    cache_salt: str | None = None
    num_cached_tokens: int = 0
    block_names: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    host_block_ids: list[int] = field(default_factory=list)
    guide: Any = None
    speculates: bool = False
    draft_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def append(self, token_id: int) -> None:
        """Takes the token in flight."""
        self.output_token_ids.append(token_id)
        self.num_tokens += 1

    def known_tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start ... stop - 1."""
        split = len(self.prompt_token_ids)
        if stop <= split:
            return self.prompt_token_ids[start:stop]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[max(start - split, 0) : max(stop - split, 0)]

    def input_token(self, position: int) -> int:
        """The token that a decode computes there: a known one, or a guess."""
        if position >= self.num_tokens:
            return self.draft_token_ids[position - self.num_tokens]
        return self.known_tokens(position, position + 1)[0]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
      logprob: natural logarithm, from the model's raw logits.
      rank: 1 for the likeliest token of the position.
      decoded_token: the token's text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One completion. `stop_reason` is the stop text or stop token id that matched, None for EOS and for length."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic()`; None: not yet.

    `queue_s` and `time_to_first_token_s` are durations since arrival.
    """

    arrival_time_s: float
    first_scheduled_time_s: float | None = None
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        return None if self.first_scheduled_time_s is None else self.first_scheduled_time_s - self.arrival_time_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time_s is None else self.first_token_time_s - self.arrival_time_s


@dataclass(slots=True)
class RequestOutput:
    """All that is known of a request so far; `finished` once nothing more will come.

    `num_cached_tokens`: of the prompt (of its first completion, if there are several), found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
