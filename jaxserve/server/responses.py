"""What answers carry: OpenAI's fields, and vLLM's `stop_reason`, `prompt_logprobs`, `reasoning_content`, `token_ids`
and `prompt_token_ids`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


def _is_none(value: Any) -> bool:
    return value is None


Optional = Field(default=None, exclude_if=_is_none)
"""A field that is left out where there is nothing to say."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class _Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(BaseModel):
    """Lists of equal length, an entry a token; `text_offset` is where it begins in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Annotated[PromptLogprobs | None, Optional] = None
    token_ids: Annotated[list[int] | None, Optional] = None
    prompt_token_ids: Annotated[list[int] | None, Optional] = None


class Completion(_Answer):
    """Of /v1/completions, whole or a chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, Optional] = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class FunctionCall(BaseModel):
    name: Annotated[str | None, Optional] = None
    arguments: str


class ToolCallMessage(BaseModel):
    """Whole, or a piece of one: then with an index, and id, type and name in the first only."""

    index: Annotated[int | None, Optional] = None
    id: Annotated[str | None, Optional] = None
    type: Annotated[Literal["function"] | None, Optional] = None
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: Annotated[str | None, Optional] = None
    tool_calls: Annotated[list[ToolCallMessage] | None, Optional] = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: Annotated[list[int] | None, Optional] = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: Annotated[PromptLogprobs | None, Optional] = None
    prompt_token_ids: Annotated[list[int] | None, Optional] = None


class Delta(BaseModel):
    role: Annotated[Literal["assistant"] | None, Optional] = None
    content: Annotated[str | None, Optional] = None
    reasoning_content: Annotated[str | None, Optional] = None
    tool_calls: Annotated[list[ToolCallMessage] | None, Optional] = None


class DeltaChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Annotated[int | str | None, Optional] = None
    token_ids: Annotated[list[int] | None, Optional] = None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[DeltaChoice]
    usage: Annotated[Usage | None, Optional] = None
    prompt_token_ids: Annotated[list[int] | None, Optional] = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    prompt: str


class Generated(BaseModel):
    """Of /generate: prompt and completion joined, one text for each of n."""

    text: list[str]
