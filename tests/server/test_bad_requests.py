"""What is wrong with a request is said in OpenAI's form, before anything is streamed, and harms nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.scripted import Vocabulary
from tests.server.conftest import Running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "a"}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}}

# path, body, status, param
BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [""]}, 400, "prompt[0]"),
    (TEXT, {"prompt": ["a", ""]}, 400, "prompt[1]"),
    (TEXT, {"prompt": [[]]}, 400, "prompt[0]"),
    (TEXT, {"prompt": 5}, 400, "prompt"),
    (TEXT, {"prompt": ["a", 5]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [10**6]}, 400, "prompt"),
    (TEXT, {"prompt": [[97], [10**30]]}, 400, "prompt[1]"),
    (TEXT, {"prompt": "a" * 500}, 400, "prompt"),
    (TEXT, {"prompt": "a" * 5000}, 400, "prompt"),  # long enough to be tokenised apart from the event loop
    (TEXT, {"prompt": "\ud800"}, 400, "prompt"),
    (TEXT, {"prompt": "a", "model": "other"}, 404, "model"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    (TEXT, {"prompt": "a", "min_p": 2}, 400, "min_p"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
    (TEXT, {"prompt": "a", "n": 10**9}, 400, "n"),
    (TEXT, {"prompt": ["a"] * 100, "n": 100}, 400, "n"),
    (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, 400, "n"),
    (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of"),
    (TEXT, {"prompt": "a", "suffix": "z"}, 400, "suffix"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"word": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [999999]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": "a", "seed": 2**70}, 400, "seed"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
    (TEXT, {"prompt": "a", "cache_salt": ""}, 400, "cache_salt"),
    (TEXT, {"prompt": "a", "priority": 1e400}, 400, "priority"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXT, {"prompt": "a", "response_format": {"type": "yaml"}}, 400, "response_format.type"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_object"}, "min_tokens": 2}, 400, "min_tokens"),
    (TEXT, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, 400, "structured_outputs.regex"),
    (TEXT, {"prompt": "a", "structured_outputs": {"verse": "a"}}, 400, "structured_outputs"),
    (TEXT, {"prompt": "a", "guided_json": {"type": "objekt"}}, 400, "guided_json"),
    (TEXT, {"prompt": "a", "use_beam_search": True}, 400, "use_beam_search"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "a"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]}, 400,
     "messages[0].content[1].type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 500}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, 400, "messages"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 30}, 400, "top_logprobs"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
     400, "response_format"),
    (CHAT, {"messages": HI, "tools": [{"function": {"name": "f", "parameters": {"type": "foo"}}}],
            "tool_choice": "required"}, 400, "tools"),
    (CHAT, {"messages": HI * 10_001}, 400, "messages"),
    (CHAT, {"messages": HI, "guided_choice": []}, 400, "guided_choice"),
    (TEXT, {"prompt": "a", "guided_regex": "(["}, 400, "guided_regex"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
     400, "response_format"),
    (TEXT, {"prompt": "a", "bad_words": ["x"] * 2000}, 400, "bad_words"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": "a", "logprobs": True}, 400, "logprobs"),
    (TEXT, {"prompt": ["a"] * 3000}, 400, "prompt"),
    (TEXT, {"prompt": "a" * 10**7}, 400, "prompt"),
    ("/tokenize", {"prompt": "a" * 10**7}, 400, "prompt"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, 400,
     "chat_template_kwargs.chat_template"),
    (CHAT, {"messages": HI, "add_generation_prompt": True, "continue_final_message": True}, 400,
     "add_generation_prompt"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": HI, "tool_choice": "auto"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [{"function": {"name": "f"}}], "tool_choice": "auto"}, 400, "tool_choice"),
    (CHAT, {"messages": HI, "tools": [{"function": {"name": "f"}}], "tool_choice": "required", "guided_regex": "a"},
     400, "tool_choice"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 10**30}, 400, "max_completion_tokens"),
    (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "xx"}}, 400, "structured_outputs.grammar"),
    (TEXT, {"prompt": "a", "structured_outputs": {"grammar": "x ::= y"}}, 400, "structured_outputs.grammar"),
    (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, 400, "modalities"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/generate", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("/generate", {"prompt": ""}, 400, "prompt"),
]
HARMLESS: list[dict[str, Any]] = [
    {"user": "me", "store": False, "metadata": {}, "something_unknown": [1]}, {"logit_bias": {}}, {"best_of": 1},
    {"suffix": ""}, {"stop": None, "seed": None, "n": None}, {"response_format": {"type": "text"}},
    {"use_beam_search": False}, {"echo": None, "priority": None, "return_tokens_as_token_ids": None, "stream": None},
    {"chat_template_kwargs": {"self": 1, "field": 2, "environment": 3}}, {"seed": -1}, {"top_k": -1}, {"stop": []}]


@pytest.fixture
def server(scripted: Callable[..., Running]) -> Running:
    vocabulary = Vocabulary(["x", "y"])
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return scripted(vocabulary, {"a": [*vocabulary.ids("x", "y"), vocabulary.eos]}, chat_template=template)


def test_each_is_refused_by_name_and_the_next_is_served(server: Running) -> None:
    for path, body, status, param in BAD:
        # Some of it is no JSON by the letter (surrogates, infinity), but what clients send.
        for content in ([body, body | {"stream": True}] if "stream" not in body and path != "/tokenize" else [body]):
            if "stream_options" in content and content.get("stream"):
                continue
            answer = server.http.post(path, content=json.dumps(content), headers={"content-type": "application/json"})
            assert answer.status_code == status, (path, content, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param, (path, content, error)
            assert error["type"] == "invalid_request_error" and len(error["message"]) < 600
            assert answer.headers["content-type"] == "application/json"
    server.settle()
    assert server.post(TEXT, prompt="a", temperature=0).json()["choices"][0]["text"] == "xy"


def test_fields_that_others_understand_do_no_harm(server: Running) -> None:
    for extra in HARMLESS:
        for body in ({"prompt": "a"}, {"messages": HI}):
            path = TEXT if "prompt" in body else CHAT
            if path == CHAT and extra.keys() & {"best_of", "suffix"}:
                continue
            answer = server.post(path, **body, **extra)
            assert answer.status_code == 200, (extra, answer.text)


def test_messages_say_what_is_wrong_in_words_of_the_api(server: Running) -> None:
    def told(path: str, content: bytes, kind: str = "application/json") -> str:
        answer = server.http.post(path, content=content, headers={"content-type": kind})
        message: str = answer.json()["error"]["message"]
        return message

    for path in (TEXT, "/tokenize"):
        assert "content-type: application/json" in told(path, b'{"prompt": "a"}', "text/plain")
    assert told(TEXT, b"{bad").startswith("the body is no JSON: ")
    assert told(TEXT, b'{"prompt": {}}').split("; ") == [
        "prompt: Input should be a valid string", "prompt: Input should be a valid list"]
    assert told("/tokenize", b"{}") == "prompt: Field required; messages: Field required"
    assert "stream_options={} is" in told(TEXT, b'{"prompt": "a", "stream_options": {}}')


def test_codes_that_clients_look_for(server: Running) -> None:
    too_long = server.post(CHAT, messages=[{"role": "user", "content": "a" * 500}]).json()["error"]
    assert too_long["code"] == "context_length_exceeded" and "500" in too_long["message"]
    assert "128" in too_long["message"]
    assert server.post(TEXT, prompt="a", model="other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b"null", b"5", b'"a"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 50_000,
    b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}]}",
    b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 400 + b"]" * 400 + b"}]}"])
def test_what_is_no_request(server: Running, content: bytes) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize", "/generate"):
        answer = server.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400) if b'"x"' in content else answer.status_code == 400, answer.text
        assert answer.status_code == 200 or answer.json()["error"]["message"]


def test_other_methods_paths_and_types(server: Running) -> None:
    assert server.http.get(TEXT).status_code == 405 and server.http.get(TEXT).json()["error"]["message"]
    assert server.http.get("/nothing").status_code == 404
    form = server.http.post(TEXT, data={"prompt": "a"})
    assert form.status_code == 400 and form.json()["error"]["type"] == "invalid_request_error"


def test_no_file_of_the_machine_can_be_read(server: Running) -> None:
    for path in ("/../settings.py", "/%2e%2e/settings.py", "/..%2fsettings.py", "/chat_page/../app.py", "//etc/passwd",
                 "/v1/models/../../etc/passwd", "/%2fetc%2fpasswd"):
        answer = server.http.get(path)
        assert answer.status_code == 404 and "root:" not in answer.text, path
    body = {"prompt": "a", "chat_template": "/etc/passwd", "model": "/etc/passwd"}
    assert server.post(TEXT, **body).status_code == 404
    local = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    refused = server.post(CHAT, messages=local)
    assert refused.status_code == 400 and "root:" not in refused.text
