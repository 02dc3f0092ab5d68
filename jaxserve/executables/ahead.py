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
from jaxserve.runner.buckets import FIRST_PROMPT_TOKENS, NAME

_started: dict[tuple[Path, str], Future[compat.Loaded]] = {}


def program_for_first_prompt(names: Iterable[str], num_tokens: int = FIRST_PROMPT_TOKENS) -> str | None:
    """The smallest of these steps that holds a prompt of so many tokens by itself, or the largest."""
    sizes: dict[str, list[int]] = {"lone": [], "mixed": []}
    for name in names:
        if (found := NAME.fullmatch(name)) and found[1] in sizes:
            sizes[found[1]].append(int(found[2]))
    kind = "lone" if sizes["lone"] else "mixed"
    best = min(sizes[kind], key=lambda size: (size < num_tokens, abs(size - num_tokens)), default=None)
    return None if best is None else f"{kind}-{best}"


def tokens_in(text: str) -> int:
    """About so many, rather more: in a chat template, before there is a tokenizer."""
    return 40 + len(text.encode(errors="replace")) // 3


def start(folder: str | Path, num_tokens: int = FIRST_PROMPT_TOKENS) -> None:
    """Begins to load, if the programs are for this processor, these versions and these sources, on one device. Says
    nothing of what is wrong: the engine will, when it asks for its programs.

    Args:
      num_tokens: of the first prompt.
    """
    folder = Path(folder).expanduser()
    try:
        manifest = read_manifest(folder)
    except ExecutablesError:
        return
    name = program_for_first_prompt(manifest.programs, num_tokens)
    if name is None or not _is_for_here(manifest):
        return
    future = _started[folder, name] = Future()
    threading.Thread(target=_load, args=(folder, name, manifest, future), daemon=True).start()


def begun(folder: Path) -> str | None:
    """The program of this folder that is being loaded."""
    return next((name for place, name in _started if place == folder), None)


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
