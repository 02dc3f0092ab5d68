"""`jaxserve bench`: measures servers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.cli.options import command
from jaxserve.errors import InvalidInputError


def _target(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Server", **more)


def _prompts(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Prompts", **more)


def _load(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Load", **more)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Where the requests go."""

    base_url: Annotated[str | None, _target(help="Instead of --host and --port; without /v1.")] = None
    host: Annotated[str, _target(help="Of the server.")] = "127.0.0.1"
    port: Annotated[int, _target(help="Of the server.")] = 8000
    backend: Annotated[str, _target(help="openai: /v1/completions; openai-chat: /v1/chat/completions.")] = "openai"
    endpoint: Annotated[str | None, _target(help="Another path.")] = None
    model: Annotated[str | None, _target(
        "--model", "-m", help="Name of the model in the API. Default: the first in /v1/models.")] = None
    api_key: Annotated[str | None, _target(help="Key that requests bring.", envvar="OPENAI_API_KEY")] = None
    temperature: Annotated[float, _target(help="Of all requests.")] = 0.0
    ignore_eos: Annotated[bool, _target("--ignore-eos", help=(
        "Ask for answers of the full length; a server that is not vLLM or jaxserve may refuse this."))] = False
    request_timeout: Annotated[float, _target(help="Seconds after which a request counts as failed.")] = 6 * 3600.0


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    dataset_name: Annotated[str, _prompts(help="random, or with --dataset-path: sharegpt or custom.")] = "random"
    dataset_path: Annotated[Path | None, _prompts(help=(
        "ShareGPT JSON; for custom: text, a line a prompt, or lines of JSON with prompt and output_tokens."))] = None
    num_prompts: Annotated[int, _prompts(min=1, help="Requests.")] = 1000
    random_input_len: Annotated[int, _prompts(min=1, help="Tokens of a prompt.")] = 1024
    random_output_len: Annotated[int, _prompts(min=1, help="Tokens of an answer.")] = 128
    random_range_ratio: Annotated[float, _prompts(help="Both vary evenly by this share.")] = 0.0
    random_prefix_len: Annotated[int, _prompts(min=0, help="Tokens more at the start, the same in all.")] = 0
    output_len: Annotated[int | None, _prompts(
        "--output-len", "--sharegpt-output-len", "--custom-output-len", min=1,
        help="Tokens of an answer to a file's prompt. Default: as in the file, else 128.")] = None
    tokenizer: Annotated[str | None, _prompts(help=(
        "Folder of the model's tokenizer, to count by. Default: a word is a token, or four characters are."))] = None
    seed: Annotated[int, _prompts(help="Of prompts, lengths and arrivals.")] = 0


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When it is asked."""

    request_rate: Annotated[float, _load(help="Requests a second; inf: all at once.")] = math.inf
    burstiness: Annotated[float, _load(help="1: Poisson arrivals; less: in bursts; more: evenly.")] = 1.0
    max_concurrency: Annotated[int | None, _load(min=1, help="Requests under way at most.")] = None
    num_warmups: Annotated[int, _load(min=0, help="Requests before the measurement.")] = 1


def serve(
    *,
    metric_percentiles: Annotated[str, typer.Option(help="Separated by commas.")] = "90,99",
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the latencies there.")] = None,
    target: TargetOptions,
    prompts: PromptOptions,
    load: LoadOptions,
) -> None:
    """Measure a server that speaks OpenAI's API: time to first token, between tokens and to the end, and throughput.

    Options are named as those of `vllm bench serve`. Latencies are of complete answers, and count from when a request
    is sent, which --max-concurrency may delay. Exit code 1: no answer was complete.
    """
    import asyncio

    from rich.console import Console
    from tqdm import tqdm

    from jaxserve.server.bench.client import Target, measure
    from jaxserve.server.bench.figures import figures
    from jaxserve.server.bench.prompts import arrivals
    from jaxserve.server.bench.report import check_plot, show
    from jaxserve.server.bench.report import plot as draw

    percentiles = _percentiles(metric_percentiles)
    if plot is not None:
        check_plot(plot)
    more: dict[str, Any] = {"temperature": target.temperature}
    if target.ignore_eos:
        more["ignore_eos"] = True
    where = Target(base_url=target.base_url or f"http://{target.host}:{target.port}", backend=target.backend,
                   endpoint=target.endpoint, model=target.model, api_key=target.api_key, more=more,
                   timeout_s=target.request_timeout)
    asked = _make_prompts(prompts)
    send_at = arrivals(len(asked), load.request_rate, load.burstiness, prompts.seed)
    with tqdm(total=len(asked), leave=False, disable=not sys.stderr.isatty()) as bar:
        found = figures(asyncio.run(measure(
            where, asked, send_at, max_concurrency=load.max_concurrency, num_warmups=load.num_warmups,
            on_done=lambda: bar.update(1) and None)))
    title = f"{len(asked)} requests, {_load_in_words(load)}"
    show(found, percentiles, title, Console(highlight=False))
    if as_json is not None:
        settings = {"request_rate": str(load.request_rate), "burstiness": load.burstiness, "num_prompts": len(asked),
                    "max_concurrency": load.max_concurrency, "url": where.url}
        as_json.write_text(json.dumps(settings | found.as_json(percentiles), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        draw(found, plot, title)
    if not found.completed:
        raise typer.Exit(1)


def _make_prompts(options: PromptOptions) -> list[Any]:
    from jaxserve.server.bench.prompts import file_prompts, random_prompts

    count: Callable[[str], int] | None = None
    if options.tokenizer is not None:
        from jaxserve.text import Tokenizer

        tokenizer = Tokenizer.from_folder(options.tokenizer)
        count = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    if options.dataset_name == "random":
        return random_prompts(options.num_prompts, options.random_input_len, options.random_output_len,
                              options.random_range_ratio, options.random_prefix_len, options.seed, count)
    if options.dataset_name not in ("sharegpt", "custom"):
        raise InvalidInputError("dataset_name", options.dataset_name, "random, sharegpt or custom")
    if options.dataset_path is None:
        raise InvalidInputError("dataset_path", None, f"a file, for dataset_name={options.dataset_name}")
    return file_prompts(options.dataset_path, options.num_prompts, options.output_len, options.seed, count)


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= point <= 100 for point in found):
        raise InvalidInputError("metric_percentiles", text, "numbers from 0 to 100, separated by commas")
    return found


def _load_in_words(load: LoadOptions) -> str:
    words = "all at once" if math.isinf(load.request_rate) else f"{load.request_rate:g} a second"
    return words + (f", at most {load.max_concurrency} under way" if load.max_concurrency else "")


app = typer.Typer(name="bench", no_args_is_help=True, help="Measure servers.")
app.command()(command(serve))


@app.callback()
def _group() -> None:
    """Without this, typer makes a group of one command that command."""
