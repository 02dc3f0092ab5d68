"""At the end of a run, a table of what the kernels that it compiled take on each architecture."""

from collections import defaultdict
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows: defaultdict[tuple[str, float], list[list[int]]] = defaultdict(list)
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if isinstance(report, pytest.TestReport) and report.when == "call":
            values: list[Any] = [value for name, value in report.user_properties if name == "kernel"]
            for kernel, architecture, *resources in values:
                rows[kernel, float(architecture)].append(resources)
    if not rows:
        return
    terminalreporter.section("compiled kernels: the most that any case takes")
    terminalreporter.line(f"{'kernel':35} {'arch':>5} {'cases':>6} {'registers':>10} {'spilled B':>10} {'shared B':>9}")
    for (kernel, architecture), cases in sorted(rows.items()):
        registers, spilled, shared = map(max, zip(*cases, strict=True))
        terminalreporter.line(
            f"{kernel:35} {architecture:5} {len(cases):6} {registers:10} {spilled:10} {shared:9}"
        )
