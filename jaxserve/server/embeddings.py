"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from jaxserve.errors import InvalidInputError
from jaxserve.server.errors import ErrorResponse
from jaxserve.server.service import Service

router = APIRouter(tags=["OpenAI"], responses={400: {"model": ErrorResponse}})

MAX_INPUTS = 2048
"""OpenAI's limit."""


class EmbeddingRequest(BaseModel):
    """Attributes:
    dimensions: only the model's own number.
    pooling, normalize: not OpenAI's; which states make the vector, and whether its length is 1.
    """

    model_config = ConfigDict(extra="allow")

    input: str | list[int] | list[str] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True
    add_special_tokens: bool = True

    def inputs(self) -> list[tuple[str, str | list[int]]]:
        """Each with its field's name; raises InvalidInputError where there are none, or too many."""
        if isinstance(self.input, str) or (self.input and isinstance(self.input[0], int)):
            return [("input", self.input)]
        if not 0 < len(self.input) <= MAX_INPUTS:
            raise InvalidInputError("input", f"{len(self.input)} of them", f"1 to {MAX_INPUTS} texts or lists of ids")
        return [(f"input[{index}]", each) for index, each in enumerate(self.input)]  # type: ignore[misc]


class EmbeddingData(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> EmbeddingAnswer:
    """A vector for each text: the model's last hidden state of its last token, or their mean."""
    service = Service.of(request)
    model = service.model_name(body.model)
    width = service.llm.hidden_size
    if body.dimensions not in (None, width):
        raise InvalidInputError("dimensions", body.dimensions, f"null or {width}: this model's vectors can't be cut")
    inputs = body.inputs()
    prompts = []
    for field, given in inputs:  # all are looked at before the first is computed
        ids = given if isinstance(given, list) else await service.llm.encode(
            given, field=field, add_special_tokens=body.add_special_tokens)
        prompts.append(service.llm.check_embedding(ids, field))
    data, count = [], 0
    for index, token_ids in enumerate(prompts):
        vector = await service.llm.embed(token_ids, pooling=body.pooling, normalize=body.normalize)
        packed: Any = vector.tolist()
        if body.encoding_format == "base64":
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append(EmbeddingData(index=index, embedding=packed))
        count += len(token_ids)
    return EmbeddingAnswer(model=model, data=data, usage=EmbeddingUsage(prompt_tokens=count, total_tokens=count))
