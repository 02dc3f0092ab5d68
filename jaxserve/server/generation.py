"""From prompts to the engine's outputs: all that one HTTP request asks the engine for."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from jaxserve.engine.inputs import Prompt
from jaxserve.errors import InvalidInputError
from jaxserve.request import CompletionOutput, RequestOutput, SamplingParams
from jaxserve.server.context import RequestRecord
from jaxserve.server.errors import as_api_error
from jaxserve.server.responses import PromptTokensDetails, Usage
from jaxserve.server.service import Service
from jaxserve.server.settings import MAX_CHOICES
from jaxserve.server.stream import DONE, event

if TYPE_CHECKING:
    from jaxserve.engine.async_llm import RequestStream


@dataclass(frozen=True)
class Piece:
    """New tokens of one choice.

    Attributes:
      choice: its number in the answer: completions of the first prompt, then of the second, ...
      prompt: the prompt's number.
    """

    choice: int
    prompt: int
    completion: CompletionOutput
    output: RequestOutput


class Generation:
    """The completions of some prompts, queued and on their way. Made by `start`."""

    def __init__(self, streams: list[RequestStream], n: int, record: RequestRecord, drops_output: bool):
        self._streams, self._n, self._record, self._drops_output = streams, n, record, drops_output
        self._prompt_tokens = [0] * len(streams)
        self._cached_tokens = [0] * len(streams)

    @classmethod
    async def start(cls, service: Service, record: RequestRecord, prompts: Sequence[tuple[Prompt, str]],
                    params: SamplingParams, *, priority: int = 0, drops_output: bool = False) -> Generation:
        """Queues all prompts, each with its name in errors, or none.

        Args:
          drops_output: only the prompts are of interest; what the engine generates is left out.

        Raises:
          JaxserveError: the request is wrong or there is no room for it.
        """
        if len(prompts) * params.n > (most := _most_choices(service)):
            field, value = ("prompt", f"{len(prompts)} prompts") if params.n == 1 else ("n", str(params.n))
            raise InvalidInputError(field, value, f"at most {most} completions over all prompts")
        streams: list[RequestStream] = []
        try:
            for prompt, field in prompts:
                # Ids of callers may come twice; the engine's must not.
                request_id = f"{record.request_id}-{uuid.uuid4().hex[:8]}"
                streams.append(await service.llm.add_request(
                    prompt, params, request_id, priority=priority, field=field,
                    deadline_s=service.settings.request_timeout))
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        record.model = service.settings.served_model_name[0]
        return cls(streams, params.n, record, drops_output)

    @property
    def usage(self) -> Usage:
        """Of what has come so far."""
        prompt, generated = sum(self._prompt_tokens), self._record.num_generated_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated,
                     prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """As they come; whoever leaves early must close it, which aborts the rest."""
        try:
            async with aclosing(_merged(self._streams)) as outputs:
                async for prompt, output in outputs:
                    if self._drops_output:
                        output = replace(output, outputs=[_without_tokens(each) for each in output.outputs])
                    self._count(prompt, output)
                    for completion in output.outputs:
                        yield Piece(prompt * self._n + completion.index, prompt, completion, output)
        finally:
            for stream in self._streams:
                await stream.aclose()

    async def whole(self) -> list[Piece]:
        """All choices in order, for parameters with FINAL_ONLY."""
        async with aclosing(self.pieces()) as pieces:
            return sorted([piece async for piece in pieces], key=lambda piece: piece.choice)

    def _count(self, prompt: int, output: RequestOutput) -> None:
        record = self._record
        self._prompt_tokens[prompt] = len(output.prompt_token_ids)
        self._cached_tokens[prompt] = output.num_cached_tokens
        record.num_prompt_tokens = sum(self._prompt_tokens)
        record.num_generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        record.finish_reasons += [c.finish_reason for c in output.outputs if c.finish_reason is not None]
        if prompt == 0:
            record.metrics = output.metrics


def _most_choices(service: Service) -> int:
    """More than run and wait at most could never be queued together."""
    config = service.llm.config
    if config.max_waiting_requests is None or config.max_num_seqs is None:
        return MAX_CHOICES
    return min(MAX_CHOICES, config.max_num_seqs + config.max_waiting_requests)


async def first_of(pieces: AsyncGenerator[Piece, None], record: RequestRecord) -> Piece:
    """The piece with which an answer that is streamed begins; if there is none, because the request has failed, the
    pieces are closed."""
    record.stream = True
    try:
        return await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise


async def events(pieces: AsyncGenerator[Piece, None], record: RequestRecord, *,
                 start: Callable[[], Sequence[str]], chunks: Callable[[Piece], Sequence[str]],
                 end: Callable[[], Sequence[str]]) -> AsyncGenerator[bytes, None]:
    """An answer as server-sent events. Returns once the first piece is there, or raises: a request that fails before
    gets a status that says so.

    Args:
      start, chunks, end: JSON texts of the events before all pieces, for a piece, and after all.
    """
    first = await first_of(pieces, record)

    async def send() -> AsyncGenerator[bytes, None]:
        async with aclosing(pieces):
            try:
                yield b"".join([event(text) for text in (*start(), *chunks(first))])
                async for piece in pieces:
                    if texts := chunks(piece):
                        yield b"".join([event(text) for text in texts])
                yield b"".join([event(text) for text in end()])
            except Exception as error:
                told = as_api_error(error)
                record.failure = str(told.detail)
                yield event(told.body.model_dump_json())
            yield DONE

    return send()


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of all, each with its stream's number, as they come. The first error ends them all."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                queue.put_nowait((index, output))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case None:
                    running -= 1
                case Exception() as error:
                    raise error
                case found:
                    yield found
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


def _without_tokens(completion: CompletionOutput) -> CompletionOutput:
    return CompletionOutput(completion.index, "", [], logprobs=[], finish_reason="length")


async def written(write: Callable[[], str], params: SamplingParams) -> Response:
    """A whole answer. With log-probabilities it can have hundreds of thousands of numbers: others go on meanwhile."""
    has_many = params.logprobs is not None or params.prompt_logprobs is not None
    return Response(await asyncio.to_thread(write) if has_many else write(), media_type="application/json")


def dump(model: Any) -> str:
    text: str = model.model_dump_json()
    return text
