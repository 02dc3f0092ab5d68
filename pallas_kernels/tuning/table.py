"""Reads the JSON tables of this folder.

A file maps kernel name -> rows, tried from top to bottom. Each row is {"if": {fact: condition}, "use": {name: value}}.
A condition is the one value that the fact must have, a list of allowed values, or {"min": a, "max": b} with either
end left out. The first row whose conditions all hold is used; the last one should have none.
"""

import functools
import json
from importlib import resources
from typing import Any


def look_up(operation: str, kernel: str, **facts: Any) -> dict[str, Any]:
    """The values of the first row that fits.

    Args:
        operation: the file's name without its suffix.
        kernel: which table of the file.
        facts: what rows may ask about, such as capability="9.0", head_dim=128. A fact of None fits no condition.

    Raises:
        KeyError: a row asks for a fact that is not given, or no row fits.
    """
    for row in _tables(operation)[kernel]:
        if all(_holds(facts[name], condition) for name, condition in row.get("if", {}).items()):
            return dict(row["use"])
    raise KeyError(f"tuning/{operation}.json: no row of {kernel} fits {facts}")


def _holds(fact: Any, condition: Any) -> bool:
    if isinstance(condition, dict):
        return fact is not None and condition.get("min", fact) <= fact <= condition.get("max", fact)
    return fact in condition if isinstance(condition, list) else fact == condition


@functools.cache
def _tables(operation: str) -> dict[str, list[dict[str, Any]]]:
    text = resources.files(__package__).joinpath(f"{operation}.json").read_text()
    tables: dict[str, list[dict[str, Any]]] = json.loads(text)
    return tables
