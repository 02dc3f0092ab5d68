"""Chat templates render as in transformers; what is malformed is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jaxserve.errors import InvalidInputError
from jaxserve.text import ChatTemplate, Tokenizer

CHATML = """{% if messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

PARTS = """{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' }}
{%- if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ '[' + part['text'] + ']' }}{% endfor %}{% endif %}
{%- endfor %}"""

ONLY_PARTS = """{% for message in messages %}{% set content = message.content %}
{%- for part in content %}{% if part.type == 'text' %}{{ part.text }}{% continue %}{% endif %}{% endfor %}|
{%- endfor %}"""

SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Météo <b>&'\"", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SYSTEM = {"role": "system", "content": " Be brief. "}
USER = {"role": "user", "content": "Hi <there> & 日本 "}
ANSWER = {"role": "assistant", "content": "  Hello! "}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "Zürich", "n": [1, None]}}}]}
RESULT = {"role": "tool", "content": "{\"t\": 3}", "tool_call_id": "call_1"}
THOUGHT = {"role": "assistant", "content": "Yes", "reasoning": "\nhm\n"}


@pytest.fixture(scope="module")
def reference(byte_level: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level.backend, **SPECIAL)


CASES: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    (CHATML, [USER], {}),
    (CHATML, [SYSTEM, USER, ANSWER, USER], {}),
    (CHATML, [SYSTEM, USER, ANSWER], {"add_generation_prompt": False}),
    (CHATML, [USER, ANSWER], {"continue_final_message": True}),
    (LLAMA3, [SYSTEM, USER, ANSWER, USER], {}),
    (LLAMA3, [USER, CALL], {"tools": [TOOL], "date_string": "26 Jul 2024"}),
    (LLAMA3, [USER, ANSWER], {"continue_final_message": True}),
    (MISTRAL, [USER, ANSWER, USER], {}),
    (MISTRAL, [USER, ANSWER], {"continue_final_message": True}),
    (QWEN3, [USER, CALL, RESULT], {"tools": [TOOL]}),
    (QWEN3, [USER], {"enable_thinking": False}),
    (QWEN3, [USER, THOUGHT], {"add_generation_prompt": False}),
    (PARTS, [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    (ONLY_PARTS, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
]


@pytest.mark.parametrize(("text", "messages", "options"), CASES)
def test_equals_transformers(reference: PreTrainedTokenizerFast, text: str, messages: list[dict[str, Any]],
                             options: dict[str, Any]) -> None:
    before = copy.deepcopy(messages)
    defaults = {"add_generation_prompt": not options.get("continue_final_message", False)}
    expected = reference.apply_chat_template(messages, chat_template=text, tokenize=False, **defaults | options)
    assert ChatTemplate(text, SPECIAL).render(messages, **options) == expected
    assert messages == before


def test_refusal_of_a_template_is_the_callers_error() -> None:
    template = ChatTemplate(MISTRAL, SPECIAL)
    with pytest.raises(InvalidInputError, match="roles must alternate"):
        template.render([USER, USER])
    with pytest.raises(InvalidInputError, match="Only user and assistant"):
        template.render([USER, RESULT])


def test_parts_for_a_template_of_texts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    template = ChatTemplate("{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}")
    assert template.render([parts]) == "user:a\nb"
    assert ChatTemplate(ONLY_PARTS).render([{"role": "user", "content": "a"}]) == "a|"


def test_arguments_as_json_text_are_parsed() -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = '{"city":"Zürich","n":[1,null]}'  # type: ignore[index]
    for text in (QWEN3, LLAMA3):
        template = ChatTemplate(text, SPECIAL)
        assert template.render([USER, call], tools=[TOOL]) == template.render([USER, CALL], tools=[TOOL])
    call["tool_calls"][0]["function"]["arguments"] = '{"city": '  # type: ignore[index]
    assert '{"city": ' in ChatTemplate(QWEN3, SPECIAL).render([USER, call])


def test_continuing_and_prompting_exclude_each_other() -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises(InvalidInputError, match="add_generation_prompt"):
        template.render([USER, ANSWER], add_generation_prompt=True, continue_final_message=True)
    parts = {"role": "assistant", "content": [{"type": "text", "text": "The answer"}]}
    assert template.render([USER, parts], continue_final_message=True).endswith("assistant\nThe answer")
    with pytest.raises(InvalidInputError, match=r"messages\[1\]\.content"):
        template.render([USER, CALL], continue_final_message=True)


def test_a_call_without_content_is_an_empty_text() -> None:
    template = ChatTemplate(CHATML)
    without = {key: value for key, value in CALL.items() if key != "content"}
    expected = template.render([USER, CALL | {"content": ""}, RESULT])
    assert template.render([USER, CALL, RESULT]) == template.render([USER, without, RESULT]) == expected


def test_variables_may_have_any_name() -> None:
    assert ChatTemplate("{{ self }} {{ text }}").render([USER], self=1, text=2).endswith(" 2")


def test_named_templates() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate(named)
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[TOOL]) == "tools"
    assert template.render([USER], chat_template="tool_use") == "tools"
    assert template.render([USER], chat_template="{{ messages | length }}") == "1"
    with pytest.raises(InvalidInputError, match="rag"):
        ChatTemplate({"rag": "x"}).render([USER])


def test_no_template() -> None:
    with pytest.raises(InvalidInputError, match="chat_template"):
        ChatTemplate(None).render([USER])
    with pytest.raises(InvalidInputError, match="valid Jinja"):
        ChatTemplate("{% if %}").render([USER])


@pytest.mark.parametrize(("messages", "field"), [
    ("hello", "messages"), (USER, "messages"), ([], "messages"), (None, "messages"), (["hello"], r"messages\[0\]"),
    ([USER, {"content": "x"}], r"messages\[1\]\.role"), ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
    ([{"role": "user"}], r"messages\[0\]\.content"), ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\]"),
    ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra"),
])
def test_malformed_messages(messages: Any, field: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^{field}=") as caught:
        ChatTemplate(CHATML).render(messages)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("expression", [
    "''.__class__.__mro__", "messages.append(1)", "messages[0].update(role='system')",
    "raise_exception.__globals__.keys()",
])
def test_sandbox(expression: str) -> None:
    with pytest.raises(InvalidInputError):
        ChatTemplate("{{ " + expression + " }}").render([USER])


def test_h12_one_bos_if_the_template_writes_it(byte_level: Tokenizer) -> None:
    from tokenizers import processors

    with_bos, without_bos = "{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"
    backend = copy.deepcopy(byte_level.backend)
    bos = backend.get_vocab()["<|bos|>"]
    backend.post_processor = processors.TemplateProcessing(single=["<|bos|>", "$A"], special_tokens=[("<|bos|>", bos)])
    for template, count in ((with_bos, 1), (without_bos, 0)):
        tokenizer = Tokenizer(backend, SPECIAL, template)
        assert tokenizer.encode_chat([USER]).count(bos) == count
        assert tokenizer.encode("plain").count(bos) == 1
