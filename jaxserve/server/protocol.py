"""What requests may carry: OpenAI's fields, and vLLM's for sampling."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticUseDefault

from jaxserve.errors import InvalidInputError
from jaxserve.request import RequestOutputKind, SamplingParams
from jaxserve.server.forms import form_field, form_of, named_tool, of_arguments, of_calls
from jaxserve.structured_outputs import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_N = 128

NOT_OFFERED = {
    "use_beam_search": "false: the server has no beam search (the Python class LLM has)",
    "truncate_prompt_tokens": "null: prompts are not cut",
    "logits_processors": "null: they would be code",
    "functions": "null: use tools",
    "function_call": "null: use tool_choice",
    "modalities": 'null or ["text"]: this model answers in text',
    "audio": "null: this model answers in text",
    "prompt_embeds": "null: prompts are texts or token ids",
}
"""Fields that would change the answer and so must not be ignored: what is allowed instead."""

_HARMLESS: tuple[Any, ...] = (None, False, [], {}, ["text"])


def _null_is_default(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


_NullIsDefault = BeforeValidator(_null_is_default)
"""Clients send null for what they leave open."""
Flag = Annotated[bool, _NullIsDefault]
Words = Annotated[list[str], Field(max_length=1024)]
"""Each is tokenised, or looked for at every step."""


class StreamOptions(BaseModel):
    """Attributes:
    include_usage: one more chunk before the end says what was used.
    continuous_usage_stats: every chunk does.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str


class Sampling(BaseModel):
    """How tokens are chosen; see `SamplingParams`. What is not given is as the checkpoint suggests."""

    model_config = ConfigDict(extra="allow")

    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Words | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=4096)] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Words | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _look_at_the_rest(self) -> Sampling:
        """Unknown fields are ignored, as vLLM does: clients send what other servers understand."""
        if self.model_extra:
            logger.debug("fields that are not known: %s", sorted(self.model_extra))
        return self

    def form(self) -> StructuredOutputsParams | None:
        """What the answer must look like."""
        return form_of(self)

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Inside, errors name the fields of the request instead of those that the engine knows."""
        try:
            yield
        except InvalidInputError as error:
            if (field := self.own_name(error.field)) == error.field:
                raise
            value = "what is given" if field == "tools" else error.value  # of which the engine saw something else
            raise type(error)(field, value, error.allowed) from error

    def own_name(self, field: str) -> str:
        return form_field(self) or field if field.startswith("structured_outputs") else field

    def sampling_params(self, defaults: SamplingParams, *, max_tokens: int | None,
                        output_kind: RequestOutputKind, **more: Any) -> SamplingParams:
        """Raises InvalidInputError for what is out of range or not offered."""
        for name, allowed in NOT_OFFERED.items():
            if (value := (self.model_extra or {}).get(name)) not in _HARMLESS:
                raise InvalidInputError(name, value, allowed)
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        given["structured_outputs"] = self.form()
        return replace(defaults, **given, max_tokens=max_tokens, output_kind=output_kind, **more)


class GenerationRequest(Sampling):
    """What completions and chat have in common.

    Attributes:
      request_id: vLLM's; of logs and of the answer's id, like the header x-request-id, which counts more.
      priority: lower is sooner, with --scheduling-policy priority.
      cache_salt: prefixes are shared only with requests that bring the same one.
      add_special_tokens: whether the tokenizer adds BOS and the like; default: yes for completions, no for chats, whose
        template writes them.
      return_tokens_as_token_ids: tokens in logprobs are written as "token_id:123".
      return_token_ids: the answer has token ids too, the prompt's and the completion's.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    request_id: str | None = None
    priority: Annotated[int, _NullIsDefault] = 0
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: Flag = False
    return_token_ids: Flag = False
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        """Raises InvalidInputError for combinations that make no sense."""
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError("stream_options", self.stream_options.model_dump(exclude_unset=True),
                                    "only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidInputError("prompt_logprobs", self.prompt_logprobs, "null with stream=true")

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions.

    Attributes:
      prompt: a text, token ids, or a list of either.
      max_tokens: 0 is possible with echo: then nothing is generated.
    """

    prompt: str | list[StrictInt] | list[str] | list[list[StrictInt]]
    max_tokens: int | None = 16
    echo: Flag = False
    logprobs: StrictInt | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidInputError("best_of", self.best_of, "null, or as n: all completions are returned")
        if self.suffix:
            raise InvalidInputError("suffix", self.suffix, "null: text can't be inserted before other text")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidInputError("max_tokens", 0, "at least 1, or 0 with echo=true")

    def prompts(self) -> list[str | list[int]]:
        """All of them; raises InvalidInputError where there are none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidInputError("prompt", [], "at least one text, or at least one token id")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class ChatMessage(BaseModel):
    """Attributes:
    content: a text, or parts such as {"type": "text", "text": ...}.
    """

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatOptions(BaseModel):
    """How messages become a prompt; see `ChatTemplate.render`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False

    def plain_messages(self) -> list[dict[str, Any]]:
        """Raises InvalidInputError where a part is not a text."""
        for place, message in enumerate(self.messages):
            for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if part.get("type", "text") != "text":
                    raise InvalidInputError(f"messages[{place}].content[{index}].type", part["type"],
                                            '"text": this model takes no images, sounds or files')
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def template_options(self, own_template: str | None, *, trusted: bool) -> dict[str, Any]:
        """For `ChatTemplate.render`.

        Args:
          own_template: the server's, unless the request brings one.
          trusted: requests may bring templates.
        """
        kwargs = dict(self.chat_template_kwargs or {})
        for name in ("messages", "tools", "documents", "chat_template", "add_generation_prompt",
                     "continue_final_message"):
            if name in kwargs:
                raise InvalidInputError(f"chat_template_kwargs.{name}", kwargs[name], f"not here; use {name}")
        if self.chat_template is not None and not trusted:
            raise InvalidInputError("chat_template", self.chat_template,
                                    "null: this server takes no templates (--trust-request-chat-template)")
        tools = None if self.tools is None else [tool.model_dump(exclude_none=True) for tool in self.tools]
        return kwargs | {"chat_template": self.chat_template or own_template, "tools": tools or None,
                         "documents": self.documents, "add_generation_prompt": self.add_generation_prompt,
                         "continue_final_message": self.continue_final_message}


class ChatRequest(GenerationRequest, ChatOptions):
    """POST /v1/chat/completions. `max_tokens` is the old name of `max_completion_tokens`."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: Flag = True
    echo: Flag = False

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidInputError("top_logprobs", self.top_logprobs, "null, or logprobs=true with it")
        if self.echo:
            raise InvalidInputError("echo", True, "false: chat completions do not repeat their messages")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidInputError("tool_choice", self.tool_choice, "null, or tools with it")
        if self.enforces_calls and form_of(self) is not None:
            raise InvalidInputError("tool_choice", self.tool_choice, '"auto" or "none" where the answer has a form')

    @property
    def enforces_calls(self) -> bool:
        """Whether the answer must be a call, or calls."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, Mapping)

    def own_name(self, field: str) -> str:
        if field.startswith("structured_outputs") and self.enforces_calls:
            return "tools"
        if field == "logprobs" and self.top_logprobs is not None:
            return "top_logprobs"
        if field == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().own_name(field)

    def form(self) -> StructuredOutputsParams | None:
        """Calls are a form too."""
        if not self.enforces_calls:
            return super().form()
        if tool := named_tool(self.tool_choice, self.tools):
            return of_arguments(tool)
        return of_calls(self.tools or [], parallel=self.parallel_tool_calls is not False)


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or what `TokenizeChatRequest` has."""

    model: str | None = None
    prompt: str
    add_special_tokens: Flag = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatOptions):
    model: str | None = None
    add_special_tokens: Flag = False
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model: str | None = None
    tokens: list[StrictInt]


class GenerateRequest(Sampling):
    """POST /generate: a prompt and `SamplingParams`."""

    prompt: str
    stream: Flag = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
