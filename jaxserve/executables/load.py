"""Executables for an engine: those of a folder, if they are for what it is and nothing has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxserve.compat import load_program
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import ExecutablesError
from jaxserve.executables import ahead
from jaxserve.executables.manifest import (
    Manifest,
    differences,
    file_name,
    fingerprint,
    kind_of_cpu,
    read_content,
    read_manifest,
    shapes_of,
)
from jaxserve.models.spec import ParamSpec
from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.buckets import Bucket
from jaxserve.runner.memory import shard_bytes
from jaxserve.runner.sharding import TENSOR
from pallas_kernels.dispatch import target_of

_TAKEN_OVER = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


class Executables:
    """The programs in a folder.

    Args:
      folder: that `jaxserve compile` wrote.

    Raises:
      ExecutablesError: it has no manifest that can be read.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        self.manifest: Manifest = read_manifest(self.folder)

    def params(self, model: ModelConfig) -> Mapping[str, ParamSpec] | None:
        """Of this model, if the manifest has them; of these sources and this mesh if `why_not` finds no difference."""
        is_same = self.manifest.fingerprint.get("model") == shapes_of(model)
        return self.manifest.params if is_same and self.manifest.params else None

    def take_over(self, config: EngineConfig) -> EngineConfig:
        """The options with those that nobody gave as they were when the programs were compiled.

        Raises:
          InvalidInputError: together they are impossible.
        """
        there = self.manifest.options
        given: dict[str, Any] = {name: there.get(name) for name in _TAKEN_OVER if getattr(config, name) is None}
        given |= {name: there[name] for name in ("dtype", "kv_cache_dtype")
                  if getattr(config, name) == "auto" and name in there}
        if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None:
            given["num_gpu_blocks_override"] = there["num_blocks"]
        return replace(config, **given)

    def why_not(self, blueprint: Blueprint) -> str | None:
        """What differs between the engine that the programs were compiled for and this one; None if nothing does."""
        if found := differences(self.manifest.fingerprint, fingerprint_of(blueprint)):
            return "; ".join(found)
        missing = [bucket.name for bucket in blueprint.buckets.all() if bucket.name not in self.manifest.programs]
        if missing:
            return f"not compiled yet: {', '.join(missing)}"
        return self._lacks_memory(blueprint)

    def _lacks_memory(self, blueprint: Blueprint) -> str | None:
        device = blueprint.mesh.devices.flat[0]
        if device.platform == "cpu":
            return None
        needed = shard_bytes((blueprint.leaves, blueprint.state))
        needed += max(entry.temp_bytes for entry in self.manifest.programs.values())
        pool = device.memory_stats()["bytes_limit"]
        return f"they need {needed} bytes of the device, JAX may use {pool}" if needed > pool else None

    def load(self, bucket: Bucket, blueprint: Blueprint) -> jax.stages.Compiled:
        """A program, ready to run on the blueprint's mesh.

        Raises:
          ExecutablesError: its file is not the one that was compiled; it has not been looked into.
        """
        file = self.folder / file_name(bucket.name)
        in_tree, out_tree = blueprint.trees(bucket)
        try:
            loaded = ahead.take(self.folder, bucket.name) or load_program(
                read_content(self.folder, bucket.name, self.manifest), list(blueprint.mesh.devices.flat))
            program = loaded.compiled(in_tree, out_tree)
        except ExecutablesError:
            raise
        except Exception as error:  # XLA's, pickle's: all mean that it cannot run here
            raise ExecutablesError(f"{file}: cannot be loaded ({error})") from error
        if _shapes(program.args_info) != _shapes((blueprint.arguments(bucket), {})):
            raise ExecutablesError(f"{file}: is not the program {bucket.name}")
        return program


def _shapes(arguments: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(arguments)]


def fingerprint_of(blueprint: Blueprint, device_name: str | None = None) -> dict[str, Any]:
    """Of a blueprint's programs. `device_name`: of a card that is not there; else the mesh knows it."""
    device = blueprint.mesh.devices.flat[0]
    return fingerprint(
        blueprint.model, blueprint.config, num_blocks=blueprint.cache.num_blocks,
        tensor_parallel_size=blueprint.mesh.shape[TENSOR], target=_kind(device, device_name or device.device_kind),
        buckets=list(blueprint.buckets.by_name()))


def _kind(device: jax.Device, name: str) -> dict[str, Any]:
    """What a program's device must be: the same card; for a CPU see `kind_of_cpu`."""
    if device.platform == "cpu":
        return kind_of_cpu()
    target = target_of(device)
    return {"platform": target.platform, "device": name, "compute_capability": list(target.capability or ()),
            "multiprocessors": target.num_cores}
