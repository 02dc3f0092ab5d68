"""`jaxserve profile`: where the time of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli.options import ModelOptions
from jaxserve.cli.trace import DEVICE_SCOPES, HOST_SCOPES, annotate
from jaxserve.errors import InvalidInputError
from jaxserve.request import SamplingParams

if TYPE_CHECKING:
    from jaxserve import LLM

ANNOTATED = "steps.trace.json.gz"


def profile(
    *,
    steps: Annotated[int, typer.Option(min=2, help="Steps to trace; the first takes the prompts in.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder for the trace.")] = Path("profile"),
    batch: Annotated[int, typer.Option(min=1, help="Sequences that run together.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 32,
    model: ModelOptions,
) -> None:
    """Trace some steps with XLA's profiler and say where their time went.

    Scopes: schedule, step (assemble and dispatch) and outputs (wait for the device and read) on the host; embed,
    attention, mlp, logits and sample on the device.

    DIR/steps.trace.json.gz, for https://ui.perfetto.dev: these scopes only, every device operation under its scope.

    DIR/plugins/profile/TIME/, for xprof (`pip install xprof`, `xprof --logdir DIR`): all that was recorded. Its
    *.xplane.pb carries the compiled programs with the scope of each operation; its own Perfetto file names operations
    of a CPU without their scopes.
    """
    from jaxserve import LLM

    with LLM(**model.arguments()) as llm:
        prompts = _prompts(llm, batch, prompt_tokens, steps)
        params = SamplingParams(temperature=0.8, seed=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        llm.generate(prompts, params, use_tqdm=False)  # compiles
        before = llm._engine.stats.num_steps
        llm.start_profile(str(out))
        try:
            llm.generate(prompts, params, use_tqdm=False)
        finally:
            llm.stop_profile()
        num_steps = llm._engine.stats.num_steps - before
        recorded = max((out / "plugins" / "profile").iterdir(), key=lambda folder: folder.stat().st_mtime)
        programs = [program.result().as_text() or "" for program in llm._engine.runner.programs._programs.values()]
    times = annotate(recorded / "perfetto_trace.json.gz", programs, out / ANNOTATED)
    _report(times, num_steps, f"{batch} sequences, {num_steps} steps")
    print(f"Perfetto: open {out / ANNOTATED} at https://ui.perfetto.dev\n"
          f"xprof:    pip install xprof; xprof --logdir {out}   (this run: {recorded.name})")


def _prompts(llm: LLM, batch: int, prompt_tokens: int, steps: int) -> list[list[int]]:
    """Arbitrary token ids, such that exactly `steps` steps complete them all."""
    config = llm._serving.config
    assert config.max_num_seqs and config.max_num_batched_tokens and config.max_model_len, "config is not resolved"
    if batch > config.max_num_seqs or batch * prompt_tokens > config.max_num_batched_tokens:
        raise InvalidInputError("batch", batch, f"at most {config.max_num_seqs} (--max-num-seqs) with prompts that fit "
                                f"into a step of {config.max_num_batched_tokens} tokens (--max-num-batched-tokens)")
    if prompt_tokens + steps > config.max_model_len:
        raise InvalidInputError("steps", steps, f"at most {config.max_model_len - prompt_tokens} after {prompt_tokens} "
                                f"prompt tokens (max_model_len={config.max_model_len})")
    return [[(31 * row + 7 * column) % llm._serving.model.vocab_size for column in range(prompt_tokens)]
            for row in range(batch)]


def _report(times: dict[str, float], num_steps: int, title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("where", "scope", title=title)
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    for where, scopes in (("host", HOST_SCOPES), ("device, all threads", (*DEVICE_SCOPES, "other"))):
        total = sum(times[scope] for scope in scopes) or 1.0
        for scope in scopes:
            table.add_row(where, scope, f"{times[scope] * 1e3 / num_steps:.2f}", f"{times[scope] / total:.0%}")
        table.add_section()
    Console().print(table)
