"""Options that several commands share, as dataclasses, and what turns a function that takes them into a command."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_type_hints

import typer

from jaxserve.errors import InvalidInputError, JaxserveError
from jaxserve.request import SamplingParams

ENGINE_PANEL = "Engine (defaults follow from model and platform)"


def option(panel: str, *names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _engine(help: str) -> Any:
    return option(ENGINE_PANEL, help=help)


def _sampling(help: str) -> Any:
    return option("Sampling", help=help)


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What decides the shape of an engine's steps; see `EngineConfig`."""

    dtype: Annotated[str | None, _engine("auto, float32, bfloat16 or float16.")] = None
    max_model_len: Annotated[int | None, _engine("Most tokens of a sequence.")] = None
    max_num_seqs: Annotated[int | None, _engine("Sequences that run at once.")] = None
    max_num_batched_tokens: Annotated[int | None, _engine("Tokens of a step.")] = None
    block_size: Annotated[int | None, _engine("Tokens of a KV block.")] = None
    kv_cache_dtype: Annotated[str | None, _engine("auto (as dtype), fp8 or int8.")] = None
    gpu_memory_utilization: Annotated[float | None, _engine(
        "Share of a GPU's memory to use, unless --kv-cache-memory-bytes is given.")] = None
    tensor_parallel_size: Annotated[int | None, _engine("Devices over which the model is split.")] = None
    mesh: Annotated[str | None, _engine("The same, as a mesh: tensor=N.")] = None

    def arguments(self) -> dict[str, Any]:
        """Those that were given, as keyword arguments of `LLM` and `AsyncLLM`."""
        given = _given(self)
        if (mesh := given.pop("mesh", None)) is not None:
            axis, _, size = mesh.partition("=")
            good = axis == "tensor" and size.isdecimal()
            if not good or given.setdefault("tensor_parallel_size", int(size)) != int(size):
                raise InvalidInputError("mesh", mesh, "tensor=N, with the N of --tensor-parallel-size if there is one")
        return given


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StepOptions):
    """What decides an engine's programs."""

    kv_cache_memory_bytes: Annotated[int | None, _engine("KV cache per device, in bytes.")] = None


@dataclass(frozen=True, kw_only=True)
class ModelOptions(EngineOptions):
    """A model and how to run it."""

    model: Annotated[str | None, option("Model", "--model", "-m", help=(
        "Hugging Face folder, GGUF file, or folder made by `jaxserve convert`. Default: the packaged SmolLM2."))] = None
    tokenizer: Annotated[str | None, option("Model", help="Folder of another tokenizer.")] = None
    compilation_cache_dir: Annotated[str | None, _engine('Where compiled programs are kept; "": nowhere.')] = None
    executables: Annotated[str | None, _engine("Folder that `jaxserve compile` wrote; runs code from it.")] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; see `SamplingParams`."""

    max_tokens: Annotated[int, _sampling("Most tokens to generate.")] = 512
    temperature: Annotated[float | None, _sampling(
        "0: always the likeliest token. Default: what the checkpoint suggests, else 1; SmolLM2: 0.2.")] = None
    top_p: Annotated[float | None, _sampling(
        "Only the likeliest tokens with this much probability. Default: as for --temperature; SmolLM2: 0.9.")] = None
    top_k: Annotated[int | None, _sampling("Only this many likeliest tokens.")] = None
    min_p: Annotated[float | None, _sampling("Only tokens at least this share as likely as the likeliest.")] = None
    repetition_penalty: Annotated[float | None, _sampling("Above 1: avoid tokens seen before.")] = None
    presence_penalty: Annotated[float | None, _sampling("Above 0: avoid generated tokens.")] = None
    frequency_penalty: Annotated[float | None, _sampling("Above 0: avoid them more the more often they came.")] = None
    seed: Annotated[int | None, _sampling("Same seed, same tokens.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the output; may be given several times.")] = None
    ignore_eos: Annotated[bool | None, option("Sampling", "--ignore-eos", help=(
        "Generate on past the model's end token."))] = None

    def params(self, defaults: SamplingParams, *, packaged_model: bool, n: int = 1) -> SamplingParams:
        """The checkpoint's defaults with what was given in their place.

        Args:
          packaged_model: use the values that SmolLM2's model card recommends; its file carries none.
        """
        if packaged_model:
            defaults = replace(defaults, temperature=0.2, top_p=0.9)
        return replace(defaults, **_given(self), n=n)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Of every command."""

    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is loaded and compiled.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


def _given(options: Any) -> dict[str, Any]:
    return {field.name: value for field in fields(options) if (value := getattr(options, field.name)) is not None}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A function for typer: parameters that are option groups become their fields, `CommonOptions` is added, and errors
    become one line on stderr with exit code 2, Ctrl-C exit code 130."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    groups["_common"] = CommonOptions
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
                  for name, parameter in inspect.signature(function).parameters.items() if name not in groups]
    for group in groups.values():
        types = get_type_hints(group, include_extras=True)
        parameters += [inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default,
                                         annotation=types[field.name]) for field in fields(group)]

    def run(**given: Any) -> None:
        made = {name: group(**{field.name: given.pop(field.name) for field in fields(group)})
                for name, group in groups.items()}
        common: CommonOptions = made.pop("_common")
        if common.verbose:
            logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
            logging.getLogger("jax").setLevel(logging.WARNING)
        _guarded(lambda: function(**given, **made), debug=common.debug)

    # Typer keeps line breaks inside a paragraph; the terminal should decide where they are.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    run.__name__, run.__doc__ = function.__name__, "\n\n".join(" ".join(text.split()) for text in paragraphs)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


INTERRUPTED = 130
PIPE_CLOSED = 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
"""Exit codes after Ctrl-C, and if whoever reads stdout has gone, as a shell reports them."""


def _guarded(call: Callable[[], None], *, debug: bool) -> None:
    try:
        call()
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        if not isinstance(end, BrokenPipeError) and not isinstance(end.__context__, BrokenPipeError):
            raise
        # rich and typer would make it 1, which for `plan` means something else.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except JaxserveError as error:
        if debug:
            traceback.print_exc()
        print(f"jaxserve: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
