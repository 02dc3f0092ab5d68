"""What form an output must have, with vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidInputError
from jaxserve.mappings import from_mapping

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of these forms. The output is of it when it ends by itself, and the beginning of one when a limit cuts it.

    Attributes:
      json: a JSON schema, as a mapping or as text; True: any JSON.
      regex: a regular expression that the whole output matches.
      choice: texts, one of which the output is.
      grammar: in Lark's syntax as llguidance has it, or GBNF.
      json_object: any JSON object.
      whitespace_pattern: a regular expression for the space between JSON's tokens; default: JSON's own, up to 40
        characters.
      disable_any_whitespace: no space at all between them.
      disable_additional_properties: objects have only the properties that the schema names.

    Raises:
      InvalidInputError: none or several forms, or one of another type. Whether a form can be understood is seen when
        the request is made.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        if len(given := self._given()) != 1:
            raise InvalidInputError("structured_outputs", given, f"exactly one of {', '.join(_FORMS)}")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidInputError(f"structured_outputs.{name}", getattr(self, name), "a text")
        if self.choice is not None and (isinstance(self.choice, str) or not self.choice or not all(
                isinstance(text, str) and text for text in self.choice)):
            raise InvalidInputError("structured_outputs.choice", self.choice, "a list of texts that are not empty")
        if isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json.loads(self.json))
            except ValueError as error:
                raise InvalidInputError("structured_outputs.json", self.json, f"a JSON schema ({error})") from error
        if not isinstance(self.json, Mapping | bool | None):
            raise InvalidInputError("structured_outputs.json", self.json, "a JSON schema")

    @property
    def form(self) -> str:
        """Which one it is."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in _FORMS if getattr(self, name) not in (None, False)]

    @classmethod
    def of(cls, value: Any) -> StructuredOutputsParams | None:
        """From one of these, a mapping of its attributes, or None.

        Raises:
          InvalidInputError: it is none of these.
        """
        return from_mapping(cls, "structured_outputs", value)
