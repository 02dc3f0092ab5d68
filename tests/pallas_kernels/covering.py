"""A few combinations out of many, such that each pair of values meets at least once."""

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def covering(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every value of every axis meets every value of every other axis in at least one of the combinations returned.

    Greedy: each combination starts from a pair that has not met, and takes on each other axis the value that brings the
    most new pairs.
    """
    sizes = {name: range(len(values)) for name, values in axes.items()}
    missing = {frozenset({(a, i), (b, j)}) for a, b in combinations(axes, 2) for i, j in product(sizes[a], sizes[b])}
    rows = []
    while missing:
        row = dict(min(missing, key=sorted))
        for name in axes:
            if name not in row:
                row[name] = max(sizes[name], key=lambda i: len(_pairs({**row, name: i}) & missing))
        missing -= _pairs(row)
        rows.append({name: axes[name][row[name]] for name in axes})
    return rows


def grid(axes: Mapping[str, Sequence[Any]], full: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the axes in `full`, with values drawn for the others: the same ones each time."""
    draw = random.Random(0)
    rows = []
    for values in product(*(axes[name] for name in full)):
        drawn = {name: draw.choice(choices) for name, choices in axes.items() if name not in full}
        rows.append(dict(zip(full, values, strict=True)) | drawn)
    return rows


def _pairs(row: Mapping[str, int]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}
