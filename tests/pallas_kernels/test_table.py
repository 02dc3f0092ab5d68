"""The table at the end of a run: a line for each kernel and architecture, with the most that any case takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.pallas_kernels.conftest import pytest_terminal_summary


def report(when: Any, *kernels: list[Any]) -> pytest.TestReport:
    properties: list[tuple[str, Any]] = [("kernel", kernel) for kernel in kernels]
    properties.append(("other", 1))
    return pytest.TestReport("test", ("file", 1, "test"), {}, "passed", None, when, user_properties=properties)


def table_of(**stats: Any) -> list[list[str]]:
    lines: list[str] = []
    pytest_terminal_summary(SimpleNamespace(stats=stats, section=lines.append, line=lines.append))
    return [line.split() for line in lines[2:]]


def test_the_most_of_all_cases():
    passed = [
        report("call", ["write", "10.0", 20, 0, 512], ["attend", "9.0", 96, 0, 4096]),
        report("call", ["write", "10.0", 30, 0, 0]),
        report("teardown", ["write", "10.0", 99, 99, 99]),  # what was recorded is in the reports of every phase
    ]
    failed = [report("call", ["write", "8.0", 255, 16, 0])]
    assert table_of(passed=passed, failed=failed, deselected=[object()]) == [
        ["attend", "9.0", "1", "96", "0", "4096"],
        ["write", "8.0", "1", "255", "16", "0"],
        ["write", "10.0", "2", "30", "0", "512"],
    ]


def test_no_table_of_nothing():
    assert table_of(passed=[report("call")]) == []
