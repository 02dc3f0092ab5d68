"""`jaxserve plan`: what a model needs on a card, before there is one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from jaxserve.cli.options import StepOptions


def plan(
    model: Annotated[str, typer.Argument(
        help="A checkpoint, a config.json, or a well-known model's name, such as Llama-3.1-8B.")],
    *,
    target: Annotated[str, typer.Option(help="a100, a10g, l4, rtx4090, h100, h200, b200, or all to rank them.")],
    quantization: Annotated[str | None, typer.Option(
        help="Of the weights: gptq, awq, int4 or fp8. Default: as the checkpoint has them.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    options: StepOptions,
) -> None:
    """Tell whether a model fits on a card, with how much room, and how fast it can be at best.

    Compiles the engine's largest step for the card, without one, so that the bytes are the program's own. Exit code 1:
    it does not fit.
    """
    from rich.console import Console

    from jaxserve.planning import Plan, plan_all, remedies
    from jaxserve.planning import plan as plan_one
    from jaxserve.planning.planner import num_changes
    from jaxserve.planning.show import show_plan, show_ranking
    from jaxserve.targets.target import TARGETS

    given = options.arguments() | {"quantization": quantization}
    console = Console(highlight=False)
    if target.lower() == "all":
        with _progress(len(TARGETS), "compiling for every card") as on_done:
            ranked = plan_all(model, on_done=on_done, **given)
        if as_json:
            print(json.dumps([entry.as_json() if isinstance(entry, Plan) else
                              {"target": entry.target.name, "fits": False, "reason": entry.reason}
                              for entry in ranked], indent=2))
        else:
            show_ranking(ranked, model, console)
        fits = any(isinstance(entry, Plan) and entry.fits for entry in ranked)
    else:
        with _progress(1, "compiling the largest step") as on_done:
            found = plan_one(model, target=target, on_done=on_done, **given)
        helpful = []
        if not found.fits:
            with _progress(num_changes(found), "looking for what would make it fit") as on_done:
                helpful = remedies(found, on_done)
        if as_json:
            changes = [{"change": remedy.change, **remedy.plan.as_json()} for remedy in helpful]
            print(json.dumps(found.as_json() | {"remedies": changes}, indent=2))
        else:
            show_plan(found, model, helpful, console)
        fits = found.fits
    if not fits:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr, gone when it is over; nothing where stderr is no terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield lambda: bar.update(1) and None
