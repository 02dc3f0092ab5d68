"""The form that an answer must have: OpenAI's response_format and tool_choice, vLLM's structured_outputs, guided_*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidInputError
from jaxserve.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.server.protocol import Sampling, Tool

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields."""


def form_of(body: Sampling) -> StructuredOutputsParams | None:
    """What a request asks for by its own fields.

    Raises:
      InvalidInputError: more than one form, or one that is not there.
    """
    found: dict[str, StructuredOutputsParams | None] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = StructuredOutputsParams.of(body.structured_outputs)
    for field, form in _GUIDED.items():
        if (value := (body.model_extra or {}).get(field)) is not None:
            found[field] = StructuredOutputsParams.of({form: value})
    wanted = getattr(body, "response_format", None)
    if wanted is not None and wanted.type != "text":
        found["response_format"] = _of_response_format(wanted.type, wanted.model_extra or {})
    if len(found) > 1:
        raise InvalidInputError(next(iter(found)), "given", f"only one of {', '.join(found)}")
    return next(iter(found.values()), None)


def form_field(body: Sampling) -> str | None:
    """The field by which a request asks for a form, where it isn't the engine's own, structured_outputs."""
    for field in _GUIDED:
        if (body.model_extra or {}).get(field) is not None:
            return field
    return None if getattr(body, "response_format", None) is None else "response_format"


def _of_response_format(kind: str, more: Mapping[str, Any]) -> StructuredOutputsParams:
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise InvalidInputError("response_format.type", kind, "text, json_object or json_schema")
    given = more.get("json_schema")
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidInputError("response_format.json_schema", given, "an object whose schema is a JSON schema")
    return StructuredOutputsParams(json=schema)


def named_tool(choice: Any, tools: Sequence[Tool] | None) -> Tool | None:
    """The tool that tool_choice names, if it names one.

    Raises:
      InvalidInputError: there is no such tool.
    """
    if not isinstance(choice, Mapping):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools or ():
        if tool.function.name == name and choice.get("type", "function") == "function":
            return tool
    allowed = ", ".join(tool.function.name for tool in tools or ())
    raise InvalidInputError("tool_choice", dict(choice), '{"type": "function", "function": {"name": NAME}}, NAME one '
                            f"of {allowed}")


def of_arguments(tool: Tool) -> StructuredOutputsParams:
    """The arguments of a call, as JSON."""
    return StructuredOutputsParams(json=_arguments(tool))


def of_calls(tools: Sequence[Tool], *, parallel: bool) -> StructuredOutputsParams:
    """A JSON array of calls, at least one, with "name" and "parameters" each."""
    calls = [{"type": "object", "properties": {"name": {"const": tool.function.name}, "parameters": _arguments(tool)},
              "required": ["name", "parameters"], "additionalProperties": False} for tool in tools]
    most = {} if parallel else {"maxItems": 1}
    return StructuredOutputsParams(json={"type": "array", "minItems": 1, "items": {"anyOf": calls}} | most)


def _arguments(tool: Tool) -> dict[str, Any]:
    if not tool.function.parameters:  # a function that takes nothing
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | tool.function.parameters
