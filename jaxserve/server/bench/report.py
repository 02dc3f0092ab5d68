"""A run's figures as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxserve.errors import InvalidInputError
from jaxserve.server.bench.figures import LATENCIES, Figures, percentile


def show(found: Figures, percentiles: Sequence[float], title: str, console: Console) -> None:
    """Prints two tables, and the failures if there are any."""
    rates = Table(title=title, show_header=False)
    rates.add_column()
    rates.add_column(justify="right")
    for name, value in (
            ("Complete answers", f"{found.completed}"), ("Failures", f"{sum(found.errors.values())}"),
            ("Duration (s)", f"{found.duration:.2f}"), ("Input tokens", f"{found.total_input_tokens}"),
            ("Output tokens", f"{found.total_output_tokens}"), ("Requests/s", f"{found.request_throughput:.2f}"),
            ("Output tokens/s", f"{found.output_throughput:.1f}"),
            ("Input and output tokens/s", f"{found.total_token_throughput:.1f}")):
        rates.add_row(name, value)
    console.print(rates)
    times = Table("ms")
    for name in ("mean", "median", *(f"p{point:g}" for point in percentiles)):
        times.add_column(name, justify="right")
    for name, text in LATENCIES.items():
        values = found.latencies[name]
        mean = sum(values) / len(values) if values else None
        times.add_row(f"{text} ({name.upper()})", *map(_ms, [
            mean, percentile(values, 50), *(percentile(values, point) for point in percentiles)]))
    console.print(times)
    for kind, count in sorted(found.errors.items(), key=lambda item: -item[1]):
        console.print(f"{count} failed: {kind}", style="red", markup=False)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def check_plot(path: Path) -> None:
    """Fails before the work is done rather than after it.

    Raises:
      InvalidInputError: matplotlib is not installed, or does not write files of this kind.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError("plot", str(path), "only with matplotlib: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise InvalidInputError("plot", str(path), f"a file whose name ends in .{', .'.join(sorted(known))}")


def plot(found: Figures, path: Path, title: str) -> None:
    """Draws, for each latency, which share of the requests (or gaps) was faster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    figure.suptitle(title)
    for axes, (name, text) in zip(figure.subplots(1, len(LATENCIES), sharey=True), LATENCIES.items(), strict=True):
        values = sorted(found.latencies[name])
        axes.step([*values[:1], *values], [index / max(len(values), 1) for index in range(len(values) + bool(values))],
                  where="post")
        axes.set(title=f"{name.upper()} ({len(values)})", ylim=(0, 1.02), xlim=(0, None))
        axes.set_xlabel(f"{text}, ms", fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
