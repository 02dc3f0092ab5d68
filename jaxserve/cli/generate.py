"""`jaxserve generate`: prompts in, completions out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import ModelOptions, SamplingOptions
from jaxserve.cli.streaming import Answer, stream, streaming_llm, write
from jaxserve.errors import InvalidInputError
from jaxserve.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxserve import AsyncLLM

Prompts = list[Any]
"""Texts, and lists of chat messages."""


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Default: all of stdin.")] = None,
    *,
    prompts_file: Annotated[Path | None, typer.Option(
        help='More prompts, one a line. Lines of a .jsonl file are a string, {"prompt": text} or {"messages": [...]}.',
    )] = None,
    chat: Annotated[bool | None, typer.Option(
        "--chat/--raw", help="Put the prompt into the model's chat template, or not. Default: if it has one.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Completions of each prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a prompt, with ids and times.")] = False,
    streams: Annotated[bool, typer.Option("--stream/--no-stream", help="Show a single answer as it comes.")] = True,
    sampling: SamplingOptions,
    model: ModelOptions,
) -> None:
    """Complete prompts, or answer them if the model has a chat template.

    Answers go to stdout in the order of the prompts, speed and errors to stderr.
    """
    asked = _prompts(prompts or [], prompts_file)
    packaged_model = model.model is None
    if len(asked) == 1 and n == 1 and streams and not as_json:
        with streaming_llm(model, asked[0]) as async_llm:
            params = sampling.params(async_llm.get_default_sampling_params(), packaged_model=packaged_model)
            _stream_one(async_llm, _templated(asked, chat, async_llm.get_tokenizer())[0], params)
        return
    from jaxserve import LLM

    with LLM(**model.arguments()) as llm:
        params = sampling.params(llm.get_default_sampling_params(), packaged_model=packaged_model, n=n)
        start = time.monotonic()
        outputs = llm.generate(_templated(asked, chat, llm.get_tokenizer()), params,
                               use_tqdm=len(asked) > 1 and sys.stderr.isatty())
        _print_all(outputs, asked, as_json, time.monotonic() - start)
    if any(output.error for output in outputs):
        raise typer.Exit(2)


def _prompts(given: list[str], file: Path | None) -> Prompts:
    prompts: Prompts = list(given)
    if file is not None:
        prompts += _read_file(file)
    elif not prompts:
        if sys.stdin.isatty():
            print("(type the prompt; Ctrl-D on a new line ends it)", file=sys.stderr)
        prompts = [sys.stdin.read().rstrip("\n")]
    if not prompts or not all(prompts):
        raise InvalidInputError("prompt", "", "a text: as an argument, in --prompts-file or on stdin")
    return prompts


def _read_file(file: Path) -> Prompts:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError("prompts_file", str(file), f"a readable UTF-8 text file ({error})") from error
    if file.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    return [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: str, place: str) -> Any:
    allowed = 'a JSON string, {"prompt": text} or {"messages": [...]}'
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInputError(place, line, f"{allowed} ({error})") from error
    prompt = (item.get("prompt") or item.get("messages")) if isinstance(item, dict) else item
    if not prompt or not isinstance(prompt, str | list):
        raise InvalidInputError(place, line, allowed)
    return prompt


def _templated(prompts: Prompts, chat: bool | None, tokenizer: Any) -> Prompts:
    """Texts become a user's message where they should."""
    if chat is None:
        chat = tokenizer is not None and bool(tokenizer.chat.templates)
    if not chat:
        return prompts
    return [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]


def _stream_one(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> None:
    answer = Answer()
    stream(llm, prompt, params, answer, write)
    if not answer.text.endswith("\n"):
        write("\n")
    print(answer.speed, file=sys.stderr)


def _print_all(outputs: list[RequestOutput], asked: Prompts, as_json: bool, seconds: float) -> None:
    for number, (output, prompt) in enumerate(zip(outputs, asked, strict=True), start=1):
        if as_json:
            print(json.dumps(_as_json(output, prompt), ensure_ascii=False))
        else:
            _print_text(output, number if len(outputs) > 1 else None)
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    waits = [wait for output in outputs if (wait := output.metrics.time_to_first_token_s) is not None]
    first = f", first token after {median(waits):.2f} s (median)" if waits else ""
    print(f"{len(outputs)} prompts, {num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s{first}",
          file=sys.stderr)


def _print_text(output: RequestOutput, number: int | None) -> None:
    if output.error is not None:
        print(f"jaxserve: {output.error}", file=sys.stderr)
    for completion in output.outputs:
        labels = [f"prompt {number}"] * (number is not None) + [f"completion {completion.index + 1}"] * (
            len(output.outputs) > 1)
        if labels:
            write(f"--- {', '.join(labels)}\n")
        write(completion.text + "\n")


def _as_json(output: RequestOutput, prompt: Any) -> dict[str, Any]:
    metrics = output.metrics
    found: dict[str, Any] = {"prompt": prompt, "prompt_token_ids": output.prompt_token_ids, "outputs": [
        {"index": completion.index, "text": completion.text, "token_ids": completion.token_ids,
         "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        for completion in output.outputs]}
    if output.error is not None:
        return found | {"error": str(output.error)}
    assert metrics.last_token_time_s is not None
    return found | {"metrics": {
        "queue_s": metrics.queue_s, "time_to_first_token_s": metrics.time_to_first_token_s,
        "total_s": metrics.last_token_time_s - metrics.arrival_time_s, "num_preemptions": metrics.num_preemptions}}
