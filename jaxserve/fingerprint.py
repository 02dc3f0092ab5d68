"""What a compiled step depends on besides its shapes: our own sources, and the versions of what compiles them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_SOURCES = ("jaxserve/layers", "jaxserve/models", "jaxserve/runner", "jaxserve/sampling", "jaxserve/parallel.py",
            "jaxserve/targets/compiling.py", "pallas_kernels")
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin")


def step_sources() -> dict[str, str]:
    """File -> SHA-256 of all that a step is traced from."""
    return sources(_SOURCES)


@cache
def sources(places: tuple[str, ...]) -> dict[str, str]:
    """File -> SHA-256 of the Python and JSON files in these files and folders."""
    found = {}
    for place in places:
        files = (_ROOT / place).rglob("*") if (_ROOT / place).is_dir() else [_ROOT / place]
        for file in sorted(files):
            if file.suffix in (".py", ".json"):
                found[file.relative_to(_ROOT).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def compiler_versions() -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def digest(value: Any) -> str:
    """SHA-256 of anything that JSON can hold; other objects by their repr."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
