"""The chat's loop with a scripted model, and once with a tiny one."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.chat import Chat
from jaxserve.cli.streaming import write
from jaxserve.errors import PromptTooLongError
from jaxserve.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from tests.cli.conftest import Run
from tests.tiny import save_tokenizer, tiny_tokenizer


class ScriptedLLM:
    """Answers "<user's last message>!" word by word; counts words as tokens; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def get_tokenizer(self) -> ScriptedLLM:
        return self

    def encode_chat(self, messages: list[dict[str, str]]) -> list[str]:
        return [word for message in messages for word in message["content"].split()]

    async def generate(self, messages: list[dict[str, str]], params: SamplingParams) -> AsyncIterator[RequestOutput]:
        self.asked.append([dict(message) for message in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise PromptTooLongError("prompt", "9 tokens", "at most 8")
        pieces = [f"{word} " for word in text.split()] + ["!"]
        for index, piece in enumerate(pieces):
            if piece == "interrupt ":
                raise KeyboardInterrupt
            reason: Any = "stop" if index == len(pieces) - 1 else None
            yield RequestOutput("0", None, [], [CompletionOutput(0, piece, [1], finish_reason=reason)], bool(reason),
                                RequestMetrics(0.0, 0.0, 1.0, 2.0 + index))


Talk = Callable[..., ScriptedLLM]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    def talk(*lines: str, limit: int = 1000, system: str | None = None, interactive: bool = False) -> ScriptedLLM:
        llm: Any = ScriptedLLM()
        chat = Chat(llm, SamplingParams(max_tokens=4), limit, system)
        chat._interactive = interactive
        queue = iter(lines)

        def read() -> str:
            line = next(queue, None)
            if line is None:
                raise EOFError
            if line == "^C":
                raise KeyboardInterrupt
            return line

        monkeypatch.setattr(chat, "_read", read)
        chat.run()
        return llm

    return talk


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_history(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk("a b", "", "c")
    assert llm.asked == [[user("a b")], [user("a b"), assistant("a b !"), user("c")]]
    assert capsys.readouterr().out == "a b !\nc !\n"


def test_commands(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk("a", "/reset", "/system be kind", "b", "/system", "/help", "/nonsense", " /etc is", "/quit", "never")
    system = {"role": "system", "content": "be kind"}
    assert llm.asked == [[user("a")], [system, user("b")], [user("b"), assistant("b !"), user("/etc is")]]
    assert "/nonsense is not a command" in capsys.readouterr().err


def test_oldest_turns_are_dropped(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk("a b", "c d", "e f", limit=16, system="s")
    system = {"role": "system", "content": "s"}
    # 1 + 3 turns of 2 + 3 words would leave less than 4 for the answer.
    assert llm.asked[2] == [system, user("c d"), assistant("c d !"), user("e f")]
    assert "the context of 16 tokens is full: the oldest 1 turn is forgotten" in capsys.readouterr().err


def test_refused_message_is_forgotten(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk("too long", "b")
    assert llm.asked[1] == [user("b")]
    assert "at most 8" in capsys.readouterr().err


def test_ctrl_c_keeps_the_chat(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    llm = talk("^C", "a interrupt b", "interrupt", "c", interactive=True)
    assert llm.asked[-1] == [user("a interrupt b"), assistant("a "), user("c")]
    output = capsys.readouterr()
    assert "Ctrl-D or /quit leaves" in output.err and output.err.count("(stopped") == 2


def test_ctrl_c_ends_a_pipe(talk: Talk) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk("a interrupt", "b")


def test_tiny_model(run: Run, tiny: list[str]) -> None:
    result = run("chat", *tiny, "--temperature", "0", "--max-tokens", "6", "--system", "be", stdin="fox\ndog\n" * 4)
    assert result.exit_code == 0, result.output
    assert "turns are forgotten" in result.stderr or "turn is forgotten" in result.stderr  # 128 tokens are soon full


def test_model_without_template(run: Run, tiny: list[str], tmp_path: Path) -> None:
    save_tokenizer(tmp_path, tiny_tokenizer(), chat_template=None)
    result = run("chat", *tiny, "--tokenizer", tmp_path, stdin="fox\n")
    assert result.exit_code == 2 and "chat template" in result.stderr


def test_lines_go_on_after_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    llm: Any = ScriptedLLM()
    chat = Chat(llm, SamplingParams(), 100)
    chat._interactive = True
    typed = iter(["a \\", "b\\", "c"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert chat._read() == "a \nb\nc"


def test_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    write("\x1b[2J\t\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write("a\x1b[2J\x9b\t\n")
    assert capsys.readouterr().out == "\x1b[2J\t\na\N{SYMBOL FOR ESCAPE}[2J\ufffd\t\n"
