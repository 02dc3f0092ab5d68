"""Beam search on top of the engine, as vLLM's: each step asks for one token of every beam, with alternatives. Beams of
a prompt share their KV blocks through the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.config import check_finite
from jaxserve.errors import InvalidInputError
from jaxserve.request import MAX_LOGPROBS, FinishReason, PositionLogprobs, RequestOutput, SamplingParams

_MOST_BEAMS = MAX_LOGPROBS // 2
"""Of each beam twice as many alternatives are looked at, so that there are enough when some of them end."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """vLLM's names.

    Attributes:
      beam_width: sequences that are kept, and returned.
      max_tokens: of each.
      ignore_eos: go on past the model's end token.
      temperature: of the probabilities that are summed; 0 and 1: the model's own.
      length_penalty: sequences are compared by the sum of log-probabilities / length ** length_penalty, the end token
        not counted.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, most in (("beam_width", _MOST_BEAMS), ("max_tokens", None)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most and value > most):
                raise InvalidInputError(name, value, f"an integer from 1 to {most}" if most else "an integer above 0")
        check_finite("length_penalty", self.length_penalty)
        if self.temperature not in (0, 1):
            raise InvalidInputError("temperature", self.temperature, "0 or 1: beams follow the model's probabilities")


@dataclass
class BeamSearchSequence:
    """One result.

    Attributes:
      tokens: of prompt and output, the end token included.
      logprobs: of each output token, with the alternatives that were looked at.
      cum_logprob: sum over the output.
      text: of the output.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """A prompt's sequences, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """One prompt's."""

    num_prompt_tokens: int
    cache_salt: str | None
    live: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(prompts: Sequence[tuple[Sequence[int], str | None]], params: BeamSearchParams, *,
                stop_ids: frozenset[int], max_tokens: int,
                generate: Callable[[list[dict[str, Any]], SamplingParams], list[RequestOutput]],
                decode: Callable[[list[int]], str]) -> list[BeamSearchOutput]:
    """
    Args:
      prompts: token ids and cache salts.
      stop_ids: that end a sequence.
      max_tokens: most that a prompt may have; a beam that grows past it ends.
      generate: completes prompts.
      decode: text of output tokens.
    """
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True,
                               detokenize=False)
    searches = [_Search(len(prompt), salt, [BeamSearchSequence(list(prompt))]) for prompt, salt in prompts]
    for step in range(params.max_tokens):
        beams = [{"prompt_token_ids": beam.tokens, "cache_salt": search.cache_salt}
                 for search in searches for beam in search.live]
        if not beams:
            break
        outputs = iter(generate(beams, one_token))
        for search in searches:
            grown = [longer for beam in search.live for longer in _continuations(beam, next(outputs))]
            is_last = step + 1 == params.max_tokens or search.num_prompt_tokens + step + 1 > max_tokens
            _keep_best(search, grown, params, frozenset() if params.ignore_eos else stop_ids, is_last)
    return [_result(search, params, stop_ids, decode) for search in searches]


def _continuations(beam: BeamSearchSequence, output: RequestOutput) -> list[BeamSearchSequence]:
    if output.error is not None:
        raise output.error
    position, = output.outputs[0].logprobs or [{}]
    return [replace(beam, tokens=[*beam.tokens, token], logprobs=[*beam.logprobs, position],
                    cum_logprob=beam.cum_logprob + entry.logprob) for token, entry in position.items()]


def _keep_best(search: _Search, grown: list[BeamSearchSequence], params: BeamSearchParams, stop_ids: frozenset[int],
               is_last: bool) -> None:
    grown.sort(key=lambda beam: -beam.cum_logprob)
    search.live = []
    for beam in grown[: 2 * params.beam_width]:
        if beam.tokens[-1] in stop_ids:
            search.ended.append(replace(beam, finish_reason="stop"))
        elif len(search.live) < params.beam_width:
            search.live.append(beam)
    if is_last:
        search.ended += [replace(beam, finish_reason="length") for beam in search.live]
        search.live = []


def _result(search: _Search, params: BeamSearchParams, stop_ids: frozenset[int],
            decode: Callable[[list[int]], str]) -> BeamSearchOutput:
    def score(beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.finish_reason == "stop")
        return beam.cum_logprob / max(length, 1) ** params.length_penalty

    best = sorted(search.ended, key=score, reverse=True)[: params.beam_width]
    for beam in best:
        beam.text = decode([token for token in beam.tokens[search.num_prompt_tokens :] if token not in stop_ids])
    return BeamSearchOutput(best)

