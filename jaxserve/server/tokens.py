"""POST /tokenize, /detokenize and /generate: vLLM's own endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidInputError
from jaxserve.request import RequestOutputKind
from jaxserve.server.context import RequestRecord
from jaxserve.server.errors import ErrorResponse, as_api_error
from jaxserve.server.generation import Generation, Piece, dump, first_of
from jaxserve.server.protocol import DetokenizeRequest, GenerateRequest, TokenizeChatRequest, TokenizeRequest
from jaxserve.server.responses import Detokenized, Generated, Tokenized
from jaxserve.server.service import Service
from jaxserve.server.stream import EventStream, until_disconnect

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import AsyncLLM

router = APIRouter(tags=["vLLM"], responses={400: {"model": ErrorResponse}})


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeRequest | TokenizeChatRequest, request: Request) -> Response:
    """Token ids of a text, or of messages in the model's chat template."""
    service = Service.of(request)
    service.model_name(body.model)
    if isinstance(body, TokenizeRequest):
        prompt: Any = body.prompt
        field, options = "prompt", {}
    else:
        settings = service.settings
        prompt, field = body.plain_messages(), "messages"
        options = body.template_options(settings.chat_template, trusted=settings.trust_request_chat_template)
    token_ids = await service.llm.encode(prompt, add_special_tokens=body.add_special_tokens, field=field,
                                         chat_options=options)
    texts = None
    if body.return_token_strs:
        tokenizer = service.llm.get_tokenizer()
        texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    found = Tokenized(count=len(token_ids), max_model_len=service.llm.max_model_len, tokens=token_ids, token_strs=texts)
    return Response(dump(found), media_type="application/json")  # it needs none of FastAPI's checks


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """The text of token ids, special ones included."""
    service = Service.of(request)
    service.model_name(body.model)
    return Detokenized(prompt=await asyncio.to_thread(_text, service.llm, body.tokens))


def _text(llm: AsyncLLM, token_ids: list[int]) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < llm.vocab_size:
            raise InvalidInputError("tokens", token_id, f"token ids from 0 to {llm.vocab_size - 1}")
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise InvalidInputError("tokens", token_ids, "nothing: this engine has no tokenizer")
    text: str = tokenizer.decode(token_ids, skip_special_tokens=False)
    return text


@router.post("/generate", response_model=Generated)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Prompt and completions as plain texts; streamed as one JSON object a line, each with all the text so far."""
    with body.own_names():
        return await until_disconnect(request, _generate(Service.of(request), body, RequestRecord.of(request.scope)))


async def _generate(service: Service, body: GenerateRequest, record: RequestRecord) -> Response:
    params = body.sampling_params(
        service.llm.get_default_sampling_params(), max_tokens=body.max_tokens, logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY)
    generation = await Generation.start(service, record, [(body.prompt, "prompt")], params)
    if not body.stream:
        texts = [body.prompt + piece.completion.text for piece in await generation.whole()]
        return Response(dump(Generated(text=texts)), media_type="application/json")
    pieces = generation.pieces()
    first = await first_of(pieces, record)
    return EventStream(_lines(first, pieces, [body.prompt] * params.n, record), "application/x-ndjson")


async def _lines(first: Piece, pieces: AsyncGenerator[Piece, None], texts: list[str],
                 record: RequestRecord) -> AsyncGenerator[bytes, None]:
    def line(piece: Piece) -> bytes:
        texts[piece.choice] += piece.completion.text
        return json.dumps({"text": texts}).encode() + b"\n"

    async with aclosing(pieces):
        try:
            yield line(first)
            async for piece in pieces:
                yield line(piece)
        except Exception as error:
            told = as_api_error(error)
            record.failure = str(told.detail)
            yield told.body.model_dump_json().encode() + b"\n"
