"""Plans as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxserve.planning.planner import PROMPT_TOKENS, Plan, Refused, Remedy, full_tokens_per_s

_PARTS = (("weights", "blue"), ("sampler's rows", "magenta"), ("temporaries", "yellow"), ("KV cache", "green"),
          ("unused", "bright_black"))
_SHADES = "█▓▒░·"
_PLAIN: dict[str, Any] = dict(title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
_NOT_LOADED = "[dim]Planned only, so far: the engine does not load 4-bit or fp8 checkpoints yet.[/]"
_BAR = 10
"""Cells of a card's memory in the ranking."""


def show_plan(plan: Plan, name: str, remedies: Sequence[Remedy], console: Console) -> None:
    """Memory as a bar, then context x batch, then what would help if it does not fit."""
    console.print(f"[bold]{name}[/] on {plan.tensor_parallel_size} x {plan.target.device_name}, {_stored(plan)}")
    console.print(_memory(plan))
    if plan.fits:
        console.print(f"[bold green]fits[/]: {plan.num_blocks:,} KV blocks hold {plan.num_tokens:,} tokens; longest "
                      f"context {plan.longest_context:,} (max_model_len {plan.max_model_len:,})")
    else:
        console.print(f"[bold red]does not fit[/]: one sequence of max_model_len {plan.max_model_len:,} tokens lacks "
                      f"{_gb(plan.missing_bytes)} per card; longest context {plan.longest_context:,}")
    if plan.contexts:
        first = plan.time_to_first_token()
        console.print()
        console.print(_batches(plan))
        prompt = min(PROMPT_TOKENS, plan.max_model_len)
        console.print(f"[dim]Roofline: no program can be faster; reached are shares of it. First token of a prompt of "
                      f"{prompt:,} tokens: {_ms(first.seconds)} or more ({first.limit}). Marks: c compute, l links "
                      f"between cards, else memory.[/]")
    if not plan.is_servable:
        console.print(_NOT_LOADED)
    if not plan.fits:
        console.print()
        console.print(_remedies(remedies) if remedies else "Nothing tried makes it fit: fewer tokens, int8 cache, fp8 "
                      "or int4 weights, up to 8 cards.")
        if plan.is_servable and any(not remedy.plan.is_servable for remedy in remedies):
            console.print(_NOT_LOADED)


def show_ranking(plans: Sequence[Plan | Refused], name: str, console: Console) -> None:
    """A line for each card, the best first."""
    shown = next(plan for plan in plans if isinstance(plan, Plan))
    context = min(2048, shown.max_model_len)
    table = Table(title=f"{name}, {_stored(shown)}, {shown.tensor_parallel_size} card(s), "
                        f"max_model_len {shown.max_model_len:,}", **(_PLAIN | {"padding": 0}))
    for column in ("card", "fits", "memory"):
        table.add_column(column, min_width=_BAR if column == "memory" else None)
    for column in ("KV tokens", "longest", "batch", "tok/s ≤", "one ≤", "first ≥"):
        table.add_column(column, justify="right")
    for plan in plans:
        if isinstance(plan, Refused):
            table.add_row(plan.target.name, Text("no", "red"), Text(plan.reason, "dim"))
            continue
        batch = plan.largest_batch(context)
        verdict = Text("yes", "green") if plan.fits else Text(f"-{_gb(plan.missing_bytes)}", "red")
        speeds = [f"{full_tokens_per_s(plan):,.0f}", f"{plan.decode_tokens_per_s(context, 1):,.0f}",
                  _ms(plan.time_to_first_token().seconds)] if batch else ["", "", ""]
        table.add_row(plan.target.name, verdict, _bar(plan, _BAR), f"{plan.num_tokens:,}", f"{plan.longest_context:,}",
                      str(batch), *speeds)
    console.print(table)
    if not shown.is_servable:
        console.print(_NOT_LOADED)
    console.print(f"[dim]batch: sequences of {context:,} tokens that fit; tokens/s of that batch and of one sequence, "
                  f"first token of a prompt of {PROMPT_TOKENS:,}: rooflines, no program can be faster. {_legend()}[/]")


def _stored(plan: Plan) -> str:
    quantization = plan.model.quantization
    weights = plan.config.dtype if quantization is None else f"{quantization.kind} weights, {plan.config.dtype}"
    cache = plan.config.kv_cache_dtype
    return weights if cache == "auto" else f"{weights}, {cache} KV cache"


def _parts(plan: Plan) -> list[int]:
    used = [plan.step.weights, plan.step.state, plan.step.temporaries, plan.cache_bytes]
    return [*used, max(plan.target.memory_bytes - sum(used), 0)]


def _bar(plan: Plan, width: int) -> Text:
    """The card's memory; weights that are more than all of it fill the bar."""
    bar, whole, end, filled = Text(), plan.target.memory_bytes, 0, 0
    for size, (_, style), shade in zip(_parts(plan), _PARTS, _SHADES, strict=True):
        filled += size
        cells = min(round(filled / whole * width), width) - end
        bar.append(shade * cells, style)
        end += cells
    return bar


def _legend() -> str:
    return ", ".join(f"{shade} {name}" for shade, (name, _) in zip(_SHADES, _PARTS, strict=True))


def _memory(plan: Plan) -> RenderableType:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    config = plan.config
    sources = ["as stored, split over the cards", f"of {config.max_num_seqs} sequences",
               f"of a step of {config.max_num_batched_tokens:,} tokens, as compiled for the card",
               f"blocks of {config.block_size} tokens, {plan.step.block:,} bytes each",
               f"of {_gb(plan.target.memory_bytes)}; gpu_memory_utilization {config.gpu_memory_utilization}"]
    for (name, style), shade, size, source in zip(_PARTS, _SHADES, _parts(plan), sources, strict=True):
        table.add_row(Text.assemble((shade, style), f" {name}"), _gb(size), source)
    return Group(_bar(plan, 60), table)


def _batches(plan: Plan) -> Table:
    table = Table(title="decode tokens/s at most, by context and batch", **_PLAIN)
    table.add_column("context", justify="right")
    table.add_column("largest batch", justify="right")
    for batch in plan.batches:
        table.add_column(f"{batch}", justify="right")
    for context in plan.contexts:
        largest = plan.largest_batch(context)
        cells = [_speed(plan, context, batch) if batch <= largest else "-" for batch in plan.batches]
        table.add_row(f"{context:,}", f"{largest:,}", *cells)
    return table


def _speed(plan: Plan, context: int, batch: int) -> str:
    limit = plan.roofline.decode(context, batch).limit
    return f"{plan.decode_tokens_per_s(context, batch):,.0f}" + {"memory": "", "compute": " c", "links": " l"}[limit]


def _remedies(found: Sequence[Remedy]) -> Table:
    table = Table(title="what would make it fit", **_PLAIN)
    for column in ("change", "weights", "temporaries", "KV tokens", "longest context"):
        table.add_column(column, justify="left" if column == "change" else "right")
    for remedy in found:
        plan = remedy.plan
        table.add_row(remedy.change, _gb(plan.step.weights), _gb(plan.step.temporaries), f"{plan.num_tokens:,}",
                      f"{plan.longest_context:,}")
    return table


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
