"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.engine.inputs import Prompt
from jaxserve.request import RequestOutputKind
from jaxserve.server.context import RequestRecord
from jaxserve.server.errors import ErrorResponse
from jaxserve.server.generation import Generation, Piece, dump, events, written
from jaxserve.server.logprobs import CompletionLogprobsBuilder, Names, prompt_logprobs
from jaxserve.server.protocol import CompletionRequest
from jaxserve.server.responses import Completion, CompletionChoice
from jaxserve.server.service import Service
from jaxserve.server.stream import EventStream, until_disconnect

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", response_model=Completion, responses={400: {"model": ErrorResponse}})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Goes on with texts."""
    with body.own_names():
        return await until_disconnect(request, _answer(Service.of(request), body, RequestRecord.of(request.scope)))


async def _answer(service: Service, body: CompletionRequest, record: RequestRecord) -> Response:
    model = service.model_name(body.model)
    body.check()
    given = body.prompts()
    # An echo with log-probabilities has those of the prompt as well.
    scores_prompt = body.logprobs if body.echo and body.logprobs is not None else body.prompt_logprobs
    params = body.sampling_params(
        service.llm.get_default_sampling_params(), max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        logprobs=body.logprobs, prompt_logprobs=scores_prompt)
    prompts = [(await _prompt(service, body, prompt, field), field) for prompt, field in
               zip(given, _fields(body, len(given)), strict=True)]
    generation = await Generation.start(service, record, prompts, params, priority=body.priority,
                                        drops_output=body.max_tokens == 0)
    make = partial(Completion, id=f"cmpl-{body.request_id or record.request_id}", created=int(time.time()),
                   model=model, system_fingerprint=service.fingerprint)
    choices = _Choices(service, body, given)
    if not body.stream:
        pieces = await generation.whole()
        return await written(lambda: dump(make(choices=[*map(choices.next, pieces)], usage=generation.usage)), params)

    def chunks(piece: Piece) -> list[str]:
        choice = choices.next(piece)
        if not (choice.text or choice.finish_reason or choice.logprobs or choice.token_ids):
            return []  # nothing to see: part of a character, or of what may become a stop string
        usage = generation.usage if body.continuous_usage else None
        return [dump(make(choices=[choice], usage=usage))]

    def end() -> list[str]:
        return [dump(make(choices=[], usage=generation.usage))] if body.includes_usage else []

    return EventStream(await events(generation.pieces(), record, start=list, chunks=chunks, end=end))


def _fields(body: CompletionRequest, count: int) -> list[str]:
    is_list = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    return [f"prompt[{index}]" for index in range(count)] if is_list else ["prompt"]


async def _prompt(service: Service, body: CompletionRequest, prompt: str | list[int], field: str) -> Prompt:
    """As the engine takes it."""
    if isinstance(prompt, str) and body.add_special_tokens is False:
        prompt = await service.llm.encode(prompt, add_special_tokens=False, field=field)
    if body.cache_salt is None:
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": body.cache_salt}


class _Choices:
    """Turns pieces into choices; knows of each choice what was sent of it before."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: Sequence[str | list[int]]):
        self._body, self._prompts = body, prompts
        self._tokenizer = service.llm.get_tokenizer()
        self._names = Names(as_ids=body.return_tokens_as_token_ids)
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._skips_special = body.skip_special_tokens is not False

    def next(self, piece: Piece) -> CompletionChoice:
        body, completion = self._body, piece.completion
        is_first = piece.choice not in self._builders
        echoed = self._echo(piece) if body.echo and is_first else ""
        if is_first:
            self._builders[piece.choice] = CompletionLogprobsBuilder(
                self._tokenizer, self._names, skips_special=self._skips_special)
        builder = self._builders[piece.choice]
        logprobs = None
        if body.logprobs is not None:
            if body.echo and is_first and piece.output.prompt_logprobs is not None:
                builder.add_prompt(piece.output.prompt_token_ids, piece.output.prompt_logprobs, echoed)
            logprobs = builder.add(completion.token_ids, completion.logprobs or [])
        own: dict[str, Any] = {}
        if body.return_token_ids:
            own["token_ids"] = completion.token_ids
            if is_first:
                own["prompt_token_ids"] = piece.output.prompt_token_ids
        if body.prompt_logprobs is not None:
            own["prompt_logprobs"] = prompt_logprobs(piece.output.prompt_logprobs)
        return CompletionChoice(
            index=piece.choice, text=echoed + completion.text, logprobs=logprobs,
            finish_reason=completion.finish_reason, stop_reason=completion.stop_reason, **own)

    def _echo(self, piece: Piece) -> str:
        prompt = self._prompts[piece.prompt]
        if isinstance(prompt, str):
            return prompt
        text: str = self._tokenizer.decode(prompt, skip_special_tokens=self._skips_special) if self._tokenizer else ""
        return text

