"""Logs as lines for people, or as JSON objects for machines."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


class JsonLines(logging.Formatter):
    """One JSON object a record; the fields of access logs are its members."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"), "level": record.levelname,
                                  "logger": record.name}
        extra = getattr(record, "fields", None)
        fields |= extra if extra is not None else {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up(level: str, *, as_json: bool) -> None:
    """Everything to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else
                         logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("jax").setLevel(logging.WARNING)
    for name in ("uvicorn.access", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
