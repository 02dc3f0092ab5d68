"""Loading the program for a first prompt while the engine is still being imported: it takes about as long."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import jax

from jaxserve import compat
from jaxserve.errors import ExecutablesError
from jaxserve.executables.manifest import Manifest, kind_of_cpu, read_content, read_manifest
from jaxserve.fingerprint import compiler_versions, step_sources

FIRST_PROMPT_TOKENS = 64
"""What a first prompt is taken to have at most: a short question in a chat template."""

_started: dict[tuple[Path, str], Future[compat.Loaded]] = {}


def program_for_first_prompt(names: Iterable[str]) -> str | None:
    """The smallest of these mixed steps that holds such a prompt, or the largest."""
    mixed = sorted((int(name.removeprefix("mixed-")), name) for name in names if name.startswith("mixed-"))
    return next((name for tokens, name in mixed if tokens >= FIRST_PROMPT_TOKENS), mixed[-1][1] if mixed else None)


def start(folder: str | Path) -> None:
    """Begins to load, if the programs are for this processor, these versions and these sources, on one device. Says
    nothing of what is wrong: the engine will, when it asks for its programs."""
    folder = Path(folder).expanduser()
    try:
        manifest = read_manifest(folder)
    except ExecutablesError:
        return
    name = program_for_first_prompt(manifest.programs)
    if name is None or not _is_for_here(manifest):
        return
    future = _started[folder, name] = Future()
    threading.Thread(target=_load, args=(folder, name, manifest, future), daemon=True).start()


def take(folder: Path, name: str) -> compat.Loaded | None:
    """What was begun; waits for its end. None if nothing was.

    Raises:
      ExecutablesError: its file is not the one that was compiled.
    """
    future = _started.pop((folder, name), None)
    return None if future is None else future.result()


def _is_for_here(manifest: Manifest) -> bool:
    parts = manifest.fingerprint
    here = {"target": kind_of_cpu(), "mesh": {"tensor": 1}, "versions": compiler_versions(), "sources": step_sources()}
    return all(parts.get(part) == expected for part, expected in here.items())


def _load(folder: Path, name: str, manifest: Manifest, future: Future[compat.Loaded]) -> None:
    try:
        content = read_content(folder, name, manifest)
        future.set_result(compat.load_program(content, jax.devices("cpu")[:1]))
    except BaseException as error:
        future.set_exception(error)
