"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from jaxserve.errors import InvalidInputError, RequestTimeoutError
from jaxserve.server.context import RequestRecord
from jaxserve.server.errors import ErrorResponse
from jaxserve.server.generation import dump
from jaxserve.server.service import Service
from jaxserve.server.stream import until_disconnect

if TYPE_CHECKING:
    import numpy as np

router = APIRouter(tags=["OpenAI"], responses={400: {"model": ErrorResponse}})

MAX_INPUTS = 2048
"""OpenAI's limit."""

NOT_OFFERED = {
    "truncate_prompt_tokens": (None, "null: prompts are not cut"),
    "embed_dtype": ("float32", '"float32"'),
    "endianness": ("little", '"little"'),
    "use_activation": (True, "null or true; see normalize"),
}
"""Fields of vLLM's that would change the answer and so must not be ignored: what is allowed, also in words."""


class EmbeddingRequest(BaseModel):
    """Attributes:
    dimensions: only the model's own number.
    pooling, normalize: not OpenAI's; which states make the vector, and whether its length is 1.
    """

    model_config = ConfigDict(extra="allow")

    input: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    add_special_tokens: bool = True

    def check(self, width: int) -> None:
        """Raises InvalidInputError for what is not offered."""
        if self.dimensions not in (None, width):
            raise InvalidInputError("dimensions", self.dimensions,
                                    f"null or {width}: this model's vectors can't be cut")
        for name, (only, allowed) in NOT_OFFERED.items():
            if (value := (self.model_extra or {}).get(name)) not in (None, only):
                raise InvalidInputError(name, value, allowed)

    def inputs(self) -> list[tuple[str, str | list[int]]]:
        """Each with its field's name; raises InvalidInputError where there are none, or too many."""
        given: Sequence[Any] = self.input
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            return [("input", self.input)]  # type: ignore[list-item]
        if not 0 < len(given) <= MAX_INPUTS:
            raise InvalidInputError("input", f"{len(given)} of them", f"1 to {MAX_INPUTS} texts or lists of token ids")
        return [(f"input[{index}]", each) for index, each in enumerate(given)]


class Embedding(BaseModel):
    """Attributes:
    embedding: numbers, or the bytes of little-endian float32 in base64.
    """

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", response_model=Embeddings)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text: the model's last hidden state of its last token, or their mean."""
    service, record = Service.of(request), RequestRecord.of(request.scope)
    return await until_disconnect(request, _answer(service, body, record))


async def _answer(service: Service, body: EmbeddingRequest, record: RequestRecord) -> Response:
    llm, model = service.llm, service.model_name(body.model)
    body.check(llm.hidden_size)
    prompts = []
    for field, given in body.inputs():  # all are looked at before the first is computed
        token_ids = given if isinstance(given, list) else await llm.encode(
            given, field=field, add_special_tokens=body.add_special_tokens)
        prompts.append(llm.check_embedding(token_ids, field))
        await asyncio.sleep(0)  # a request may have thousands: others go on meanwhile
    record.model, record.num_prompt_tokens = model, sum(map(len, prompts))
    try:
        async with asyncio.timeout(service.settings.request_timeout):
            vectors = await llm.embed(prompts, pooling=body.pooling, normalize=body.normalize)
    except TimeoutError as error:
        raise RequestTimeoutError(f"not done within {service.settings.request_timeout} s") from error

    def write() -> str:
        data = [Embedding(index=index, embedding=_written(vector, body.encoding_format))
                for index, vector in enumerate(vectors)]
        count = record.num_prompt_tokens
        return dump(Embeddings(model=model, data=data, usage=EmbeddingUsage(prompt_tokens=count, total_tokens=count)))

    return Response(await asyncio.to_thread(write), media_type="application/json")  # it may be millions of numbers


def _written(vector: np.ndarray, encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
