"""What all benchmarks share: options, rounds in turn, tables, JSON, and how noisy the machine was."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").strip(),
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", help="folder or GGUF file; default: the packaged SmolLM2-135M-Instruct")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    return made


def engine_options(made: argparse.ArgumentParser) -> None:
    """Adds --engine-option, which may be repeated."""
    made.add_argument("--engine-option", action="append", default=[], dest="engine_options", type=_option,
                      metavar="NAME=VALUE", help="of jaxserve, e.g. max_num_batched_tokens=256; may be repeated")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


class Noise:
    """How many cores other processes kept busy in the meantime."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """Mean since this object was made."""
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(busy - own, 0.0) / max(wall, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        cpu = psutil.cpu_times()
        own = os.times()
        return time.monotonic(), sum(cpu) - cpu.idle - getattr(cpu, "iowait", 0.0), own.user + own.system


@dataclass(frozen=True)
class Sample:
    """One engine's run in one round."""

    result: Any
    noise_cores: float


def in_turn(names: Sequence[str], repeat: int, run: Callable[[str], Any]) -> dict[str, list[Sample]]:
    """Every engine once, then every engine again, `repeat` times, so that a slow spell of the machine hits all."""
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for _ in range(repeat):
        for name in names:
            noise = Noise()
            result = run(name)
            samples[name].append(Sample(result, noise.cores()))
    return samples


def warnings(samples: dict[str, list[Sample]]) -> list[str]:
    """What to say below a table: a busy machine does not slow all engines alike."""
    worst = max(sample.noise_cores for rounds in samples.values() for sample in rounds)
    return [f"other processes kept up to {worst:.1f} cores busy: do not trust these numbers"] if worst > 0.15 else []


def median_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Median over the rounds of ours / theirs."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def agreement(ours: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of greedy outputs: the share of outputs that are equal, and of tokens before each one's first difference."""
    same = total = 0
    for a, b in zip(ours, reference, strict=True):
        differs = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        same += differs[0] if differs else len(a)
        total += len(a)
    equal = sum(list(a) == list(b) for a, b in zip(ours, reference, strict=True))
    return {"equal_outputs": equal / len(ours), "equal_tokens": same / total}


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine(),
            "load_average": os.getloadavg(), "time": time.strftime("%Y-%m-%dT%H:%M:%S")}


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = ()) -> None:
    """Prints a table under its title, numbers to the right, and lines below it."""
    table = Table()
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*(f"{cell:,.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(f"[bold]{title}[/bold]", highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def write_json(path: Path | None, results: dict[str, Any]) -> dict[str, Any]:
    """Writes the results, if a file was asked for, with what is known of the machine; returns them."""
    results = {**results, "machine": machine()}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n")
    return results
