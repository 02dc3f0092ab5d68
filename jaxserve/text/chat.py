"""Chat templates: a conversation to the text of a prompt, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxserve.errors import InvalidInputError

if TYPE_CHECKING:
    import jinja2

_CONTINUE_MARK = "\ue000CONTINUE\ue001 "  # its last space shows whether the template trims
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One Jinja chat template, or several by name.

    Args:
      template: Jinja text; or name -> text; or, as in tokenizer_config.json, a list of {"name", "template"}.
      special_tokens: what templates may read, such as `bos_token`.

    Attributes:
      templates: name -> Jinja text; a single one is called "default".
    """

    def __init__(self, template: str | Mapping[str, str] | Sequence[Mapping[str, str]] | None,
                 special_tokens: Mapping[str, str] | None = None):
        if isinstance(template, str):
            template = {"default": template}
        elif not isinstance(template, Mapping):
            template = {entry["name"]: entry["template"] for entry in template or ()}
        self.templates = dict(template)
        self._special_tokens = dict(special_tokens or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text.

        Args:
          messages: {"role", "content", ...} each. Content is a text or a list of {"type": "text", "text"} parts,
            which are joined by newlines if the template knows only texts. Arguments of tool calls may be JSON text.
          add_generation_prompt: end with the start of an assistant message; default: unless the last is continued.
          continue_final_message: leave the last message open, for the model to go on with.
          tools: JSON schemas of functions. documents: for templates with retrieval.
          chat_template: name of one of `templates`, or Jinja text to use in their place.
          kwargs: more variables of the template, such as enable_thinking.

        Raises:
          InvalidInputError: names the message that is malformed, or says why the template refused.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidInputError("add_generation_prompt", True, "False with continue_final_message")
        text = self._select(chat_template, tools)
        compiled, wants_parts, takes_strings = _compile(text)
        chat = [_message(message, index) for index, message in enumerate(_message_list(messages))]
        for message in chat:
            _fit_content(message, wants_parts, takes_strings)
        if continue_final_message:
            _mark_end(chat)
        variables = {
            **self._special_tokens,
            **_plain(kwargs, "chat_template_kwargs"),
            "messages": chat,
            "tools": _plain_list(tools, "tools"),
            "documents": _plain_list(documents, "documents"),
            "add_generation_prompt": not continue_final_message if add_generation_prompt is None
            else add_generation_prompt,
        }
        try:
            rendered = compiled.render(variables)
        except Exception as error:  # whatever template code raises is about this input
            raise InvalidInputError("messages", chat, f"what the chat template accepts: {error}") from error
        return _cut_at_mark(rendered) if continue_final_message else rendered

    def check(self) -> None:
        """Raises InvalidInputError for what is no Jinja text."""
        for text in self.templates.values():
            _compile(text)

    def _select(self, wanted: str | None, tools: Any) -> str:
        if wanted is not None:
            return self.templates.get(wanted, wanted)
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if self.templates:
            raise InvalidInputError("chat_template", None, f"one of {sorted(self.templates)}: none is the default")
        raise InvalidInputError("chat_template", None, "a template: the model's tokenizer has none, so pass one, "
                                "or use plain prompts")


def _message_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidInputError("messages", messages, "a list of messages")
    if not messages:
        raise InvalidInputError("messages", messages, "at least one message")
    return messages


def _message(message: Any, index: int) -> dict[str, Any]:
    """A checked copy without the keys that are None, which APIs send and templates do not expect."""
    field = f"messages[{index}]"
    message = _plain(message, field)
    if not isinstance(message, dict):
        raise InvalidInputError(field, message, "a mapping with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInputError(f"{field}.role", role, "a role, such as 'user'")
    if role == "assistant":
        message.setdefault("content", "")  # one that only calls tools has none; templates add texts to it
    elif "content" not in message:
        raise InvalidInputError(f"{field}.content", None, "a text or a list of text parts")
    _check_content(message["content"], f"{field}.content")
    _parse_tool_arguments(message)
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _check_content(content: Any, field: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidInputError(field, content, "a text or a list of text parts")
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            raise InvalidInputError(f"{field}[{index}]", part, "{'type': 'text', 'text': ...}: only text is supported")


def _parse_tool_arguments(message: dict[str, Any]) -> None:
    """APIs carry the arguments of a call as JSON text; templates write them out from the parsed object."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            continue
        with suppress(ValueError):  # a call that a model got wrong is shown to it as it was
            function["arguments"] = json.loads(function["arguments"] or "{}")


def _fit_content(message: dict[str, Any], wants_parts: bool, takes_strings: bool) -> None:
    content = message.get("content")
    if isinstance(content, list) and not wants_parts:
        message["content"] = "\n".join(part["text"] for part in content)
    elif isinstance(content, str) and wants_parts and not takes_strings:
        message["content"] = [{"type": "text", "text": content}]


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if not content:
        raise InvalidInputError(f"messages[{len(chat) - 1}].content", content, "a text that can be continued")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
    else:
        content[-1]["text"] += _CONTINUE_MARK


def _cut_at_mark(rendered: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    start, found, rest = rendered.rpartition(mark)
    if not found:
        raise InvalidInputError("continue_final_message", True, "False: the chat template leaves this message out")
    return start if rest.startswith(" ") else start.rstrip()


def _plain_list(value: Any, field: str) -> list[Any] | None:
    if value is None:
        return None
    plain = _plain(value, field)
    if not isinstance(plain, list) or not all(isinstance(entry, dict) for entry in plain):
        raise InvalidInputError(field, value, "a list of mappings")
    return plain


def _plain(value: Any, field: str) -> Any:
    """A copy made of JSON types only: templates come with downloaded models and must not get at other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "model_dump"):  # pydantic
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{field}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{field}[{index}]") for index, item in enumerate(value)]
    for base in (str, int, float):  # enums and the like
        if isinstance(value, base):
            return base(value)
    raise InvalidInputError(field, value, "JSON data")


@lru_cache(maxsize=32)
def _compile(text: str) -> tuple[jinja2.Template, bool, bool]:
    """Returns the template, whether it reads content as a list of parts, and whether as a text too."""
    import jinja2  # 40 ms that only chat needs

    environment = _environment()
    try:
        tree = environment.parse(text)
        return environment.from_string(text), *_content_formats(tree)
    except jinja2.TemplateError as error:
        raise InvalidInputError("chat_template", text, f"a valid Jinja template: {error}") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """Same settings, globals and filters as in transformers, since templates are written for these."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """`{% generation %} ... {% endgeneration %}` marks trained text; the body is rendered as it is."""

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
               separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _content_formats(tree: Any) -> tuple[bool, bool]:
    """Parts: the template loops over a message's content. Texts: it does not, or asks for the content's type."""
    from jinja2 import nodes

    def is_content(node: Any) -> bool:
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Name) and node.name in names

    names: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            names.add(assign.target.name)
    loops = any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = any(test.name in ("string", "iterable", "sequence") for test in tree.find_all(nodes.Test))
    return loops, tests or not loops
