"""Options that users may give as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from jaxserve.errors import InvalidInputError

T = TypeVar("T")


def from_mapping(cls: type[T], field: str, value: Any) -> T | None:
    """An object of a dataclass from one of it, from a mapping of its attributes, or None from None.

    Args:
      field: the option's name, for errors.

    Raises:
      InvalidInputError: it is none of these, or has what there is not.
    """
    if value is None or isinstance(value, cls):
        return value
    names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
    if not isinstance(value, Mapping) or set(value) - set(names):
        raise InvalidInputError(field, value, f"a mapping of {', '.join(names)}, or None")
    return cls(**value)
