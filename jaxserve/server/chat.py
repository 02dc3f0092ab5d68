"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.engine.inputs import Prompt
from jaxserve.errors import InvalidInputError
from jaxserve.request import CompletionOutput, RequestOutputKind
from jaxserve.server.context import RequestRecord
from jaxserve.server.errors import ErrorResponse
from jaxserve.server.forms import named_tool
from jaxserve.server.generation import Generation, Piece, dump, events, written
from jaxserve.server.logprobs import Names, chat_logprobs, prompt_logprobs
from jaxserve.server.messages import MessageParser, message, message_deltas
from jaxserve.server.parsers import enforced_calls_parser, tool_parser
from jaxserve.server.protocol import ChatRequest
from jaxserve.server.responses import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    Delta,
    DeltaChoice,
)
from jaxserve.server.service import Service
from jaxserve.server.settings import ServerSettings
from jaxserve.server.stream import EventStream, until_disconnect

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation."""
    with body.own_names():
        return await until_disconnect(request, _answer(Service.of(request), body, RequestRecord.of(request.scope)))


async def _answer(service: Service, body: ChatRequest, record: RequestRecord) -> Response:
    model = service.model_name(body.model)
    body.check()
    settings, llm = service.settings, service.llm
    if body.tool_choice == "auto" and not settings.enable_auto_tool_choice:
        raise InvalidInputError("tool_choice", "auto", "null or \"none\": this server does not look for calls "
                                "(--enable-auto-tool-choice --tool-call-parser NAME)")
    parser = _parser(body, settings)
    more: dict[str, Any] = {"skip_special_tokens": False} if parser.needs_special_tokens else {}
    params = body.sampling_params(
        llm.get_default_sampling_params(),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None, prompt_logprobs=body.prompt_logprobs, **more)
    token_ids = await llm.encode(
        body.plain_messages(), add_special_tokens=bool(body.add_special_tokens), field="messages",
        chat_options=body.template_options(settings.chat_template, trusted=settings.trust_request_chat_template))
    prompt: Prompt = token_ids
    if body.cache_salt is not None:
        prompt = {"prompt_token_ids": token_ids, "cache_salt": body.cache_salt}
    parser.set_prompt_end(llm.get_tokenizer().decode(token_ids[-16:], skip_special_tokens=False))
    generation = await Generation.start(service, record, [(prompt, "messages")], params, priority=body.priority)
    make = dict(id=f"chatcmpl-{body.request_id or record.request_id}", created=int(time.time()), model=model,
                system_fingerprint=service.fingerprint)
    if body.stream:
        return EventStream(await _stream(generation, body, record, parser, make, params.n, token_ids))
    pieces = await generation.whole()

    def write() -> str:
        answer = ChatCompletion(**make, choices=[_choice(piece, body, parser) for piece in pieces],  # type: ignore[arg-type]
                                usage=generation.usage)
        if body.prompt_logprobs is not None:
            answer.prompt_logprobs = prompt_logprobs(pieces[0].output.prompt_logprobs)
        if body.return_token_ids:
            answer.prompt_token_ids = token_ids
        return dump(answer)

    return await written(write, params)


def _parser(body: ChatRequest, settings: ServerSettings) -> MessageParser:
    """Calls that are enforced come as JSON, and nothing before them; others as the model marks them."""
    if body.enforces_calls:
        tool = named_tool(body.tool_choice, body.tools)
        calls = enforced_calls_parser(tool.function.name if tool else None)
        return MessageParser(calls, None, keeps_reasoning=False, parallel=body.parallel_tool_calls is not False)
    looks = bool(body.tools) and body.tool_choice != "none" and settings.enable_auto_tool_choice
    return MessageParser(tool_parser(settings.tool_call_parser) if looks and settings.tool_call_parser else None,
                         settings.reasoning_parser, keeps_reasoning=body.include_reasoning,
                         parallel=body.parallel_tool_calls is not False)


def _choice(piece: Piece, body: ChatRequest, parser: MessageParser) -> ChatChoice:
    completion = piece.completion
    found = message(parser.deltas(piece.choice, completion.text, is_last=True))
    return ChatChoice(index=piece.choice, message=found, logprobs=_logprobs(completion, body),
                      finish_reason=_finish_reason(completion, calls=bool(found.tool_calls)),
                      stop_reason=completion.stop_reason,
                      token_ids=completion.token_ids if body.return_token_ids else None)


async def _stream(generation: Generation, body: ChatRequest, record: RequestRecord, parser: MessageParser,
                  make: dict[str, Any], n: int, prompt: list[int]) -> Any:
    chunk = partial(ChatCompletionChunk, **make)
    first: dict[str, Any] = {"prompt_token_ids": prompt} if body.return_token_ids else {}

    def usage() -> dict[str, Any]:
        return {"usage": generation.usage} if body.continuous_usage else {}

    def start() -> list[str]:
        return [dump(chunk(choices=[DeltaChoice(index=index, delta=Delta(role="assistant", content=""))], **usage(),
                           **first)) for index in range(n)]

    def chunks(piece: Piece) -> list[str]:
        completion = piece.completion
        deltas = message_deltas(parser.deltas(piece.choice, completion.text, is_last=completion.finished))
        logprobs = _logprobs(completion, body)
        token_ids = completion.token_ids if body.return_token_ids else None
        if not deltas and (completion.finished or logprobs is not None or token_ids):
            deltas = [Delta() if completion.finished else Delta(content="")]
        choices = [DeltaChoice(index=piece.choice, delta=delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, token_ids
        if completion.finished:
            choices[-1].finish_reason = _finish_reason(completion, calls=parser.has_calls(piece.choice))
            choices[-1].stop_reason = completion.stop_reason
        return [dump(chunk(choices=[choice], **usage())) for choice in choices]

    def end() -> list[str]:
        return [dump(chunk(choices=[], usage=generation.usage))] if body.includes_usage else []

    return await events(generation.pieces(), record, start=start, chunks=chunks, end=end)


def _logprobs(completion: CompletionOutput, body: ChatRequest) -> ChatLogprobs | None:
    if completion.logprobs is None:
        return None
    return chat_logprobs(completion.token_ids, completion.logprobs, body.top_logprobs or 0,
                         Names(as_ids=body.return_tokens_as_token_ids))


def _finish_reason(completion: CompletionOutput, *, calls: bool) -> str | None:
    """A message that was cut off is no finished call."""
    return "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
