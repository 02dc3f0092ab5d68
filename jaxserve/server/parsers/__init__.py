"""From a model's text to what the chat API calls reasoning, content and tool calls; whole or streamed.

    reasoning text -> ReasoningStream -> content -> ToolStream -> content and tool calls
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxserve.errors import InvalidInputError
from jaxserve.server.parsers.deltas import (
    ContentDelta,
    Delta,
    ParsedMessage,
    ParsedReasoning,
    ReasoningDelta,
    ToolCall,
    ToolCallDelta,
)
from jaxserve.server.parsers.reasoning import ReasoningParser, ReasoningStream
from jaxserve.server.parsers.tool_calls import (
    EnforcedStream,
    HermesStream,
    LlamaStream,
    MistralStream,
    ToolParser,
    ToolStream,
    new_mistral_id,
)
from jaxserve.server.parsers.tool_calls import new_id as random_id

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("deepseek_r1", "qwen3")

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ContentDelta",
    "Delta",
    "ParsedMessage",
    "ParsedReasoning",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningStream",
    "ToolCall",
    "ToolCallDelta",
    "ToolParser",
    "ToolStream",
    "enforced_calls_parser",
    "reasoning_parser",
    "tool_parser",
]


def tool_parser(name: str, new_id: Callable[[], str] | None = None) -> ToolParser:
    """The parser of a model family's tool calls.

    Args:
      name: one of `TOOL_PARSERS`, vLLM's names.
      new_id: makes the calls' ids. Default: random ones of the form that the family's chat templates accept.

    Raises:
      InvalidInputError: there is no such parser.
    """
    match name:
        case "hermes":
            return ToolParser(name, HermesStream, new_id or random_id, keep_special_tokens=False)
        case "llama3_json":
            return ToolParser(name, LlamaStream, new_id or random_id, keep_special_tokens=False)
        case "mistral":
            return ToolParser(name, MistralStream, new_id or new_mistral_id, keep_special_tokens=True)
    raise InvalidInputError("tool_call_parser", name, f"one of {', '.join(TOOL_PARSERS)}")


def enforced_calls_parser(name: str | None) -> ToolParser:
    """Of answers that were made to be calls.

    Args:
      name: of the one function, whose arguments are the answer; None: the answer is an array of calls.
    """
    return ToolParser("enforced", partial(EnforcedStream, name=name), random_id, keep_special_tokens=False)


def reasoning_parser(name: str) -> ReasoningParser:
    """The parser of a model family's reasoning.

    Args:
      name: one of `REASONING_PARSERS`, vLLM's names.

    Raises:
      InvalidInputError: there is no such parser.
    """
    if name not in REASONING_PARSERS:
        raise InvalidInputError("reasoning_parser", name, f"one of {', '.join(REASONING_PARSERS)}")
    return ReasoningParser(name, inside=name == "deepseek_r1")
