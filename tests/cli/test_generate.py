"""`jaxserve generate` with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.text import Tokenizer
from tests.cli.conftest import Run

GREEDY = ["--temperature", "0", "--max-tokens", "8", "--ignore-eos"]


def lines(stdout: str) -> list[dict]:
    return [json.loads(line) for line in stdout.splitlines()]


def test_streamed_text_equals_the_whole(run: Run, tiny: list[str]) -> None:
    streamed = run("generate", "The quick brown", *tiny, *GREEDY)
    assert streamed.exit_code == 0, streamed.output
    assert "8 tokens" in streamed.stderr and "tokens/s, first token after" in streamed.stderr
    [whole] = lines(run("generate", "The quick brown", "--json", *tiny, *GREEDY).stdout)
    assert streamed.stdout == whole["outputs"][0]["text"] + "\n"
    assert whole["outputs"][0]["finish_reason"] == "length" and len(whole["outputs"][0]["token_ids"]) == 8
    assert 0 < whole["metrics"]["time_to_first_token_s"] <= whole["metrics"]["total_s"]
    assert run("generate", "--no-stream", *tiny, *GREEDY, stdin="The quick brown\n").stdout == streamed.stdout


def test_many_prompts(run: Run, tiny: list[str], tiny_folder: Path, tmp_path: Path) -> None:
    """Given as argument and in both kinds of files; raw, as chat, and one of them too long."""
    tokenizer = Tokenizer.from_folder(tiny_folder)
    jsonl = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "fox"}]
    jsonl.write_text("\n".join([json.dumps("dog"), "", json.dumps({"prompt": "fox " * 200}),
                                json.dumps({"messages": messages})]))
    result = run("generate", "lazy", "--prompts-file", jsonl, "--json", "--raw", *tiny, *GREEDY)
    assert result.exit_code == 2  # because one was refused
    lazy, dog, long, chat = lines(result.stdout)
    assert [lazy["prompt"], dog["prompt"], chat["prompt"]] == ["lazy", "dog", messages]
    assert lazy["prompt_token_ids"] == tokenizer.encode("lazy")
    assert chat["prompt_token_ids"] == tokenizer.encode_chat(messages)
    assert "at most 128 tokens" in long["error"] and long["outputs"] == []
    assert all(len(found["outputs"][0]["token_ids"]) == 8 for found in (lazy, dog, chat))

    text = tmp_path / "prompts.txt"
    text.write_text("lazy\n\ndog\n")
    result = run("generate", "--prompts-file", text, "--raw", *tiny, *GREEDY)
    assert result.exit_code == 0
    expected = [f"--- prompt {n}\n{found['outputs'][0]['text']}\n" for n, found in ((1, lazy), (2, dog))]
    assert result.stdout == "".join(expected)
    assert "2 prompts, 16 tokens in" in result.stderr


def test_chat_template_is_the_default(run: Run, tiny: list[str], tiny_folder: Path) -> None:
    ids = Tokenizer.from_folder(tiny_folder).encode_chat([{"role": "user", "content": "fox"}])
    result = run("generate", "fox", "-n", "2", "--json", "--seed", "3", *tiny, "--max-tokens", "4")
    [found] = lines(result.stdout)
    assert found["prompt_token_ids"] == ids
    assert [output["index"] for output in found["outputs"]] == [0, 1]


@pytest.mark.parametrize(("content", "allowed"), [
    ('{"text": 1}', '{"prompt": text}'), ("nonsense", "a JSON string"), ("", "on stdin"), (None, "readable")])
def test_bad_prompts_file(run: Run, tmp_path: Path, content: str | None, allowed: str) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    result = run("generate", "--prompts-file", file, "--model", "unused")
    assert result.exit_code == 2 and allowed in result.stderr and len(result.stderr.splitlines()) == 1


def test_empty_stdin(run: Run) -> None:
    result = run("generate", "--model", "unused")
    assert result.exit_code == 2 and "prompt=''" in result.stderr
