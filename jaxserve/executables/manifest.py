"""What a folder of executables holds and was made for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.compat import processor_fingerprint
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import ExecutablesError
from jaxserve.files import write_whole
from jaxserve.fingerprint import compiler_versions, step_sources
from jaxserve.models.spec import ParamSpec

MANIFEST = "manifest.json"
_FORMAT = 1
_SHAPING = ("dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
"""The engine's options that decide its programs."""


@dataclass(frozen=True)
class Entry:
    """One program's file.

    Attributes:
      num_bytes, sha256: of the file.
      temp_bytes: what its step takes besides its arguments, per device.
    """

    num_bytes: int
    sha256: str
    temp_bytes: int
    compile_s: float


@dataclass
class Manifest:
    """
    Attributes:
      fingerprint: see the function of that name.
      programs: by the bucket's name.
      compiler_options: of XLA, if any were given.
      params: the model's, by path: shape, dtype and axes. An engine that takes them from here has nothing to trace.
    """

    fingerprint: dict[str, Any]
    programs: dict[str, Entry] = field(default_factory=dict)
    compiler_options: dict[str, Any] = field(default_factory=dict)
    params: dict[str, ParamSpec] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Engine options that the programs were compiled for, and num_blocks."""
        return self.fingerprint["options"]

    def write(self, folder: Path) -> None:
        """Atomically."""
        write_whole(folder / MANIFEST, json.dumps({"format": _FORMAT, **self._plain()}, indent=1).encode())

    def _plain(self) -> dict[str, Any]:
        params = {path: [spec.shape, str(spec.dtype), spec.axes] for path, spec in self.params.items()}
        return asdict(replace(self, params={})) | {"params": params}


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
      ExecutablesError: there is none, or none that can be read.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ExecutablesError(f"executables={str(folder)!r}: no {MANIFEST} there; jaxserve compile writes one")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        entries = {str(name): Entry(**entry) for name, entry in found.pop("programs").items()}
        params = {str(path): ParamSpec(tuple(map(int, shape)), jnp.dtype(dtype), tuple(axes))
                  for path, (shape, dtype, axes) in found.pop("params", {}).items()}
        manifest = Manifest(programs=entries, params=params, **found)
        _check(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ExecutablesError(f"executables={str(folder)!r}: its {MANIFEST} cannot be read ({error!r})") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Raises ValueError unless all that the loader uses is of its type."""
    parts = manifest.fingerprint
    wrong = [name for name in ("model", "mesh", "target", "versions", "sources")
             if not isinstance(parts.get(name, {}), dict)]
    if not isinstance(parts.get("buckets", []), list):
        wrong.append("buckets")
    if not isinstance(manifest.options, dict) or not isinstance(manifest.options.get("num_blocks"), int):
        wrong.append("options")
    for entry in manifest.programs.values():
        if not all(isinstance(number, int) for number in (entry.num_bytes, entry.temp_bytes)):
            wrong.append("programs")
    if wrong:
        raise ValueError(f"not what compile writes: {', '.join(wrong)}")


def fingerprint(model: ModelConfig, config: EngineConfig, *, num_blocks: int, tensor_parallel_size: int,
                target: Mapping[str, Any], buckets: list[str]) -> dict[str, Any]:
    """All that decides an engine's programs; programs of another fingerprint must not run.

    Args:
      config: resolved options.
      target: the kind of device.
      buckets: their names.
    """
    options = {name: getattr(config, name) for name in _SHAPING} | {"num_blocks": num_blocks}
    found = {"model": shapes_of(model), "options": options, "mesh": {"tensor": tensor_parallel_size},
             "target": dict(target), "buckets": buckets, "versions": compiler_versions(), "sources": step_sources()}
    return _as_read(found)


def shapes_of(model: ModelConfig) -> dict[str, Any]:
    """All that is in a config, but for what it was read from; as a manifest gives it back."""
    return _as_read({name: value for name, value in asdict(model).items() if name != "hf_config"})


def _as_read(written: Any) -> Any:
    return json.loads(json.dumps(written))


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what of two fingerprints is not the same; the first is a manifest's."""
    platforms = [(side.get("target") or {}).get("platform") for side in (there, here)]
    if platforms[0] != platforms[1]:
        return [f"they are for the platform {platforms[0]!r}, this is {platforms[1]!r}"]
    found = []
    for part, now in here.items():
        then = there.get(part)
        if part == "buckets":
            continue
        if not isinstance(then, dict):
            found.append(f"the manifest has no {part}")
        elif part == "sources":
            changed = sorted(file for file in then.keys() | now.keys() if then.get(file) != now.get(file))
            found += [f"changed since: {', '.join(changed[:3])}" + f" and {len(changed) - 3} more" * (len(changed) > 3)
                      ] if changed else []
        else:
            found += [f"{name} is {then.get(name)!r} there, {now.get(name)!r} here"
                      for name in {**then, **now} if then.get(name) != now.get(name) and name != "layer_windows"]
            if not found and then.get("layer_windows") != now.get("layer_windows"):
                found.append("the layers' windows differ")
    missing = [name for name in here["buckets"] if name not in (there.get("buckets") or [])]
    if missing and not found:
        found.append(f"no program for {', '.join(missing)}")
    return found


def file_name(program: str) -> str:
    """Of a program in its folder."""
    return f"{program}.executable"


def read_content(folder: Path, program: str, manifest: Manifest) -> bytes:
    """
    Raises:
      ExecutablesError: the file is not the one that was compiled.
    """
    entry, file = manifest.programs[program], folder / file_name(program)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ExecutablesError(f"{file}: {error.strerror}") from error
    if len(content) != entry.num_bytes or sha256_of(content) != entry.sha256:
        raise ExecutablesError(f"{file}: not the file that was compiled, its digest differs from the manifest's")
    return content


def kind_of_cpu() -> dict[str, Any]:
    """What a CPU must be to run a CPU's programs: one with the same instructions."""
    return {"platform": "cpu", "processor": processor_fingerprint()}


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
