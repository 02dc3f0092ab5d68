"""A picture of a simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.simulation.clock import Simulation


def check_plot(path: Path) -> None:
    """Fails before the work is done rather than after it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the file's kind is not one that it writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"plot={str(path)!r} is not allowed: a file whose name ends in .{', .'.join(sorted(known))}")


def plot(path: Path, simulation: Simulation, title: str) -> None:
    """Draws running and waiting requests and the use of the blocks over virtual time, and histograms of latencies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    figure.suptitle(title)
    requests, blocks, latencies = figure.subplots(3, 1)
    curve = simulation.occupancy.curve.columns()
    requests.plot(curve["time_s"], curve["running"], label="running", color="tab:blue")
    requests.plot(curve["time_s"], curve["waiting"], label="waiting", color="tab:orange")
    requests.set(ylabel="requests", yscale="symlog", ylim=(0, None), xlabel="virtual time, s")
    blocks.plot(curve["time_s"], [100 * share for share in curve["block_use"]], color="tab:green")
    blocks.set(ylabel="KV blocks in use, %", ylim=(0, 102), xlabel="virtual time, s")
    kinds = {"first token": simulation.first_token_s, "end to end": simulation.end_to_end_s}
    values = {name: np.maximum(found[~np.isnan(found)], 1e-4) for name, found in kinds.items()}
    longest = max(float(found.max()) for found in values.values())
    shortest = min(float(found.min()) for found in values.values())
    bins = np.geomspace(shortest * 0.99, longest * 1.01, 80).tolist()
    for name, found in values.items():
        latencies.hist(found, bins=bins, alpha=0.6, label=name)
    latencies.set(xscale="log", xlabel="seconds since arrival", ylabel="requests")
    requests.legend()
    latencies.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
