"""`jaxserve compile`: every program of an engine, compiled in parallel processes and written down."""

from __future__ import annotations

import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import CompilerError, ExecutablesError
from jaxserve.executables.manifest import MANIFEST, Entry, Manifest, differences, file_name, read_manifest, sha256_of
from jaxserve.files import write_whole
from jaxserve.planning.measure import WORKER_ENVIRONMENT
from jaxserve.runner.buckets import NAME

logger = logging.getLogger(__name__)

LOCAL = "local"
"""The target that is this machine's own devices; "cpu" is its processor."""


@dataclass(frozen=True)
class Job:
    """An engine to compile for.

    Attributes:
      config: resolved options.
      target: a card's name, "cpu" or "local".
      compiler_options: of XLA, as sorted pairs.
    """

    model: ModelConfig
    config: EngineConfig
    num_blocks: int
    target: str
    tensor_parallel_size: int
    compiler_options: tuple[tuple[str, Any], ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes that compile it."""
        if self.target == LOCAL:
            return {}
        flags = os.environ.get("XLA_FLAGS", "")
        if self.target == "cpu" and self.tensor_parallel_size > 1:
            flags += f" --xla_force_host_platform_device_count={self.tensor_parallel_size}"
        return {**WORKER_ENVIRONMENT, "XLA_FLAGS": flags}

    @property
    def num_workers(self) -> int:
        return 1 if self.target == LOCAL else os.cpu_count() or 1  # a process takes all of a GPU's memory


def build_executables(job: Job, folder: Path, *, on_start: Callable[[int, int], None] = lambda total, done: None,
                      on_done: Callable[[str, Entry], None] = lambda name, entry: None) -> Manifest:
    """Compiles what the folder does not have yet; it may be stopped at any time and taken up again.

    Args:
      folder: new, empty, or of an earlier call for the same engine. What other versions or sources compiled, which no
        engine would take any more, is made anew.
      on_start: called with how many programs there are, and how many are there already.
      on_done: called with each program that has been written.

    Raises:
      ExecutablesError: the folder holds something else, or cannot be written.
      CompilerError: XLA refuses a program, or its compiler is not installed.
    """
    try:
        return _build(job, folder, on_start, on_done)
    except OSError as error:
        raise ExecutablesError(f"out={str(folder)!r}: {error.strerror or error}") from error


def check_folder(folder: Path) -> None:
    """Raises ExecutablesError unless executables may be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_foreign = not (folder / MANIFEST).exists() and any(folder.iterdir())
    except OSError as error:
        raise ExecutablesError(f"out={str(folder)!r}: {error.strerror or error}") from error
    if is_foreign:
        raise ExecutablesError(f"out={str(folder)!r}: must be new, empty, or a folder that jaxserve compile wrote")


def _build(job: Job, folder: Path, on_start: Callable[[int, int], None],
           on_done: Callable[[str, Entry], None]) -> Manifest:
    from loky import ProcessPoolExecutor  # its processes do not import the caller's __main__

    check_folder(folder)
    warnings.filterwarnings("ignore", "A worker was restarted", module="loky")  # compilers do keep memory
    with ProcessPoolExecutor(job.num_workers, env=job.environment) as pool:
        try:
            made_for, params = pool.submit(describe, job).result()
            manifest = replace(_earlier(folder, made_for, dict(job.compiler_options)), params=params)
            names = made_for["buckets"]
            missing = [name for name in names if name not in manifest.programs]
            on_start(len(names), len(names) - len(missing))
            manifest.write(folder)
            running: dict[Future[Entry], str] = {pool.submit(compile_program, job, name, folder): name
                                                 for name in _largest_first(missing)}
            for future in as_completed(running):
                manifest.programs[running[future]] = entry = future.result()
                manifest.write(folder)
                on_done(running[future], entry)
        except (NotImplementedError, RuntimeError) as error:  # of XLA too
            pool.shutdown(wait=True, kill_workers=True)
            raise CompilerError(f"target={job.target!r}: {error}") from error
        except BaseException:
            pool.shutdown(wait=True, kill_workers=True)
            raise
    manifest.programs = {name: manifest.programs[name] for name in names}
    manifest.write(folder)
    _remove_others(folder, names)
    return manifest


def describe(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fingerprint of the job's programs, and the model's parameters. Runs in a worker."""
    from jaxserve.executables.load import fingerprint_of
    from jaxserve.targets import TARGETS, get_target

    blueprint = _blueprint(job)
    device_name = get_target(job.target).device_name if job.target in TARGETS else None
    return fingerprint_of(blueprint, device_name), blueprint.params


def compile_program(job: Job, name: str, folder: Path) -> Entry:
    """Compiles one program and writes its file. Runs in a worker."""
    from jax.experimental import serialize_executable

    from jaxserve.compat import return_freed_memory
    from jaxserve.runner.memory import temp_bytes

    start = time.monotonic()
    blueprint = _blueprint(job)
    compiled = _compile(job, blueprint, blueprint.buckets.by_name()[name])
    content, _, _ = serialize_executable.serialize(compiled)
    write_whole(folder / file_name(name), content)
    used = temp_bytes(compiled)
    del compiled
    return_freed_memory()
    return Entry(len(content), sha256_of(content), used, round(time.monotonic() - start, 2))


def _compile(job: Job, blueprint: Any, bucket: Any) -> Any:
    from jaxserve.compat import SOON_READY
    from jaxserve.targets import get_target, lowering_for
    from jaxserve.targets.compiling import compile_lowered

    options = dict(job.compiler_options)
    if bucket.is_lone:
        options |= SOON_READY
    if job.target in ("cpu", LOCAL):
        return blueprint.lower(bucket).compile(compiler_options=options or None)
    target = get_target(job.target)
    with lowering_for(target, blueprint.mesh):
        lowered = blueprint.lower(bucket)
    return compile_lowered(lowered, target, options=options)


@lru_cache(maxsize=1)
def _blueprint(job: Job) -> Any:
    from jaxserve.config import MeshConfig
    from jaxserve.runner.blueprint import blueprint
    from jaxserve.runner.sharding import make_mesh
    from jaxserve.targets import get_target

    ranks = job.tensor_parallel_size
    mesh = (make_mesh(MeshConfig(tensor=ranks)) if job.target in ("cpu", LOCAL) else get_target(job.target).mesh(ranks))
    return blueprint(job.model, job.config, mesh, job.num_blocks)


def _earlier(folder: Path, made_for: dict[str, Any], compiler_options: dict[str, Any]) -> Manifest:
    """What the folder has already of the same programs."""
    fresh = Manifest(made_for, compiler_options=compiler_options)
    if not (folder / MANIFEST).exists():
        return fresh
    earlier = read_manifest(folder)
    found = differences(earlier.fingerprint, made_for)
    if any(earlier.fingerprint.get(part) != made_for[part] for part in ("model", "options", "target", "mesh")):
        raise ExecutablesError(f"out={str(folder)!r}: holds programs for something else ({'; '.join(found)}); take "
                               "another folder, or remove it")
    if earlier.compiler_options != compiler_options:
        found.append("other options of the compiler")
    if found:
        logger.warning("all programs in %s are made anew: %s", folder, "; ".join(found))
        return fresh
    kept = {name: entry for name, entry in earlier.programs.items()
            if name in made_for["buckets"] and _is_whole(folder / file_name(name), entry)}
    return replace(earlier, fingerprint=made_for, programs=kept)


def _remove_others(folder: Path, names: list[str]) -> None:
    """Programs that nothing asks for any more, and what a killed process left half written."""
    wanted = {MANIFEST, *(file_name(name) for name in names)}
    for file in folder.iterdir():
        if file.name not in wanted and file.is_file() and re.fullmatch(rf"{NAME.pattern}\.\w+", file.name):
            file.unlink()


def _is_whole(file: Path, entry: Entry) -> bool:
    return file.is_file() and sha256_of(file.read_bytes()) == entry.sha256


def _largest_first(names: list[str]) -> list[str]:
    """So that no long compile is left to the end."""
    return sorted(names, key=lambda name: -int(name.rsplit("-", 1)[-1]))
