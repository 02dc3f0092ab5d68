"""`jaxserve chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import ModelOptions, SamplingOptions
from jaxserve.cli.streaming import Answer, spinner, stream, streaming_llm, write
from jaxserve.errors import InvalidInputError
from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve import AsyncLLM

HELP = """\
/reset        forget the conversation
/system TEXT  set the system message; without TEXT remove it
/help         this list
/quit         leave (so does Ctrl-D)
Ctrl-C stops an answer. A \\ at the end of a line goes on in the next. A space before / sends the line as it is."""


def chat(
    *,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    sampling: SamplingOptions,
    model: ModelOptions,
) -> None:
    """Talk to a chat model. Works in pipes too: a line in, an answer out."""
    with streaming_llm(model) as llm:
        if not llm.get_tokenizer().chat.templates:
            raise InvalidInputError("model", model.model, "one with a chat template; try `jaxserve generate`")
        params = sampling.params(llm.get_default_sampling_params(), packaged_model=model.model is None)
        Chat(llm, params, context_tokens(llm), system).run()


def context_tokens(llm: AsyncLLM) -> int:
    """Most tokens of a conversation: what the model sees, or less if the KV cache is smaller."""
    inputs = llm._serving.inputs
    return min(inputs._max_model_len, inputs._capacity_tokens)


class Chat:
    """A conversation: its messages, and the loop that reads lines and streams answers.

    Args:
      limit: most tokens of prompt and answer together.
      system: the system message.
    """

    def __init__(self, llm: AsyncLLM, params: SamplingParams, limit: int, system: str | None = None):
        self._llm, self._params, self._limit = llm, params, limit
        self._system = system
        self._turns: list[dict[str, str]] = []  # user and assistant by turns
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()

    @property
    def messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self._system}] if self._system else []) + self._turns

    def run(self) -> None:
        """Until /quit or the end of the input."""
        if self._interactive:
            _enable_line_editing()
            _note("/help lists the commands, Ctrl-D leaves")
        while True:
            try:
                line = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                _note("\nCtrl-D or /quit leaves")
                continue
            if line.startswith("/"):
                if not self._command(line):
                    return
            elif line.strip():
                self._reply(line.strip())
        if self._interactive:
            print()

    def _read(self) -> str:
        if not self._interactive:
            if not (line := sys.stdin.readline()):
                raise EOFError
            return line.rstrip("\n")
        # The marks tell readline which characters take no room.
        prompt, line = "\001\033[1;36m\002you>\001\033[0m\002 ", ""
        while (part := input(prompt)).endswith("\\"):
            line, prompt = line + part[:-1] + "\n", "...> "
        return line + part

    def _command(self, line: str) -> bool:
        """Carries out a /command; False: leave."""
        name, _, text = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._turns.clear()
                _note("(the conversation is forgotten)")
            case "/system":
                self._system = text.strip() or None
                _note("(system message set)" if self._system else "(no system message)")
            case "/help":
                _note(HELP)
            case _:
                _note(f"{name} is not a command\n{HELP}")
        return True

    def _reply(self, text: str) -> None:
        self._turns.append({"role": "user", "content": text})
        try:
            self._make_room()
            answer = self._stream()
        except InvalidInputError as error:  # too long, or not what the template takes: the chat goes on without it
            self._turns.pop()
            _note(f"({error})")
            return
        if answer.text:
            self._turns.append({"role": "assistant", "content": answer.text})
        else:
            self._turns.pop()

    def _stream(self) -> Answer:
        answer = Answer()
        ending = ""
        with spinner("thinking", shown=self._interactive) as waiting:
            def show(text: str) -> None:
                if self._interactive and text and text == answer.text:  # the first piece
                    waiting.stop()
                    print("\033[1;32mmodel>\033[0m ", end="")
                write(text)

            try:
                stream(self._llm, self.messages, self._params, answer, show)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                ending = "stopped"
        if answer.finish_reason == "length":
            ending = "cut off: --max-tokens or the context is used up"
        if answer.text or not self._interactive:
            write("\n")
        if self._interactive:
            _note(f"({', '.join(filter(None, [ending, answer.speed]))})")
        return answer

    def _make_room(self) -> None:
        """Drops the oldest turns until an answer fits behind the rest."""
        wanted = min(self._params.max_tokens or self._limit, self._limit // 2)
        dropped = 0
        while len(self._turns) > 1 and self._num_tokens() + wanted > self._limit:
            del self._turns[:2]
            dropped += 1
        if dropped:
            _note(f"(the context of {self._limit} tokens is full: the oldest {dropped} "
                  f"{'turn is' if dropped == 1 else 'turns are'} forgotten)")

    def _num_tokens(self) -> int:
        tokenizer: Any = self._llm.get_tokenizer()
        return len(tokenizer.encode_chat(self.messages))


def _note(text: str) -> None:
    """A remark of the program's own, apart from what the model says."""
    print(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _enable_line_editing() -> None:
    with suppress(ImportError):  # not on every platform; plain input works
        import readline  # noqa: F401  input() then edits lines and remembers them
