"""Writing files that others may read at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """A reader finds the old file or the new one, never a part. What a killed process leaves is NAME.<pid>."""
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(file)
