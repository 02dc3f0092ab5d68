"""The converted form: parameters as the model has them, in an Orbax checkpoint, beside config and tokenizer files.

    DST/jaxserve_checkpoint.json   {"format": 1, "dtype": ...}; written last, so an interrupted conversion has none
    DST/config.json, generation_config.json, tokenizer.json, tokenizer_config.json   as in an HF folder
    DST/params/                    Orbax PyTree checkpoint, nested dicts along the dotted paths

Parameters are stored as for one rank: each KV head once. Loading for more ranks than KV heads repeats them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  numpy then knows bfloat16 by name
import numpy as np

from convert.load import ParamSpec, Put, aligned_empty, default_put, load_params, report
from convert.rules import kv_repeats, repeat_kv
from convert.source import MARKER, Source, TensorSource, TokenizerData, open_source, read_json
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, InvalidInputError

_FORMAT = 1
_PARAMS = "params"


class ConvertedSource(Source):
    """A folder made by `convert_checkpoint`; see `Source`.

    Raises:
      CheckpointError: a file of it is broken, or it was written by a newer version.
    """

    def __init__(self, folder: Path):
        self.name, self._folder = str(folder), folder
        marker = read_json(folder / MARKER)
        if marker.get("format") != _FORMAT:
            raise CheckpointError(f"{folder / MARKER}: format {marker.get('format')!r} is not known; "
                                  f"this version reads {_FORMAT}")
        self.hf_config = read_json(folder / "config.json")
        self.generation_config = read_json(folder / "generation_config.json")

    @property
    def has_tokenizer(self) -> bool:
        return (self._folder / "tokenizer.json").exists()

    def tokenizer(self) -> TokenizerData:
        import tokenizers

        file = self._folder / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises bare Exception
            raise CheckpointError(f"{file}: cannot be read as a tokenizer: {error}") from error
        return TokenizerData(backend, read_json(self._folder / "tokenizer_config.json"))

    def load_params(
        self, config: ModelConfig, expected: Mapping[str, ParamSpec], *,
        tensor_parallel_size: int = 1, dtype: Any = None, put: Put | None = None,
        shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    ) -> dict[str, jax.Array]:
        """See `convert.load.load_params`. With `shardings` and no `put`, each device reads its own part."""
        import orbax.checkpoint as ocp  # here: it costs start-up time

        repeats = kv_repeats(config, tensor_parallel_size)
        stored = {path: _stored_shape(path, tuple(spec.shape), repeats) for path, spec in expected.items()}
        via_host = {path for path, spec in expected.items()
                    if put or not shardings or stored[path] != tuple(spec.shape)}
        restore_args = {}
        for path, spec in expected.items():
            wanted = dtype or spec.dtype
            restore_args[path] = (
                ocp.RestoreArgs(restore_type=np.ndarray, dtype=wanted) if path in via_host else
                ocp.ArrayRestoreArgs(dtype=wanted, sharding=shardings[path], global_shape=spec.shape))  # type: ignore[index]
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = self._shapes_found(checkpointer)
            report(self.name, stored, found, [path for path in found if path not in stored])
            args = ocp.args.PyTreeRestore(item=_nest(dict.fromkeys(expected, 0)), restore_args=_nest(restore_args))
            try:
                params = _flatten(checkpointer.restore(self._folder.absolute() / _PARAMS, args=args))
            except Exception as error:  # Orbax and TensorStore raise many kinds
                raise CheckpointError(f"{self._folder / _PARAMS}: cannot be restored: {error}") from error
        put = put or default_put(shardings)
        for path in via_host:  # one after another, so that each is dropped once it is on the device
            params[path] = put(path, _for_ranks(path, params[path], tuple(expected[path].shape), repeats))
        return {path: params[path] for path in expected}

    def _shapes_found(self, checkpointer: Any) -> dict[str, tuple[int, ...]]:
        folder = self._folder.absolute() / _PARAMS
        try:
            found = checkpointer.metadata(folder).item_metadata
        except Exception as error:
            raise CheckpointError(f"{folder}: not a readable Orbax checkpoint: {error}") from error
        if found is None:
            raise CheckpointError(f"{folder}: not a readable Orbax checkpoint: its list of arrays is missing or broken")
        return {path: tuple(array.shape) for path, array in _flatten(found.tree).items()}


def convert_checkpoint(src: str | os.PathLike[str], dst: str | os.PathLike[str], dtype: str | None = None) -> None:
    """Converts a checkpoint once, so that later loads only restore arrays: `jaxserve convert SRC DST`.

    Args:
      dtype: float32, bfloat16 or float16; None keeps the checkpoint's (float32 for a quantised GGUF: nothing is lost).

    Raises:
      ModelNotFoundError, CheckpointError, UnsupportedModelError: SRC cannot be read.
      InvalidInputError: DST is not an empty or new folder, or the dtype is not known.
    """
    from jaxserve.models.params import abstract_params
    from jaxserve.models.registry import model_config_from_hf

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InvalidInputError("dtype", dtype, "float32, bfloat16 or float16")
    _require_empty(Path(dst))
    source = open_source(src)
    if not isinstance(source, TensorSource):
        raise InvalidInputError("src", str(src), "a Hugging Face folder or a GGUF file; this one is converted already")
    config = model_config_from_hf(source.hf_config)
    expected = abstract_params(config)
    dtype = dtype or source.dtype_of("model.embed_tokens.weight").name
    params = load_params(source, config, expected, dtype=np.dtype(dtype), put=lambda path, host: host)  # type: ignore[arg-type, return-value]
    save(Path(dst), source, params, dtype)


def save(dst: Path, source: Source, params: Mapping[str, Any], dtype: str) -> None:
    """Writes parameters (as for one rank, by dotted path) with the source's config and tokenizer.

    Raises:
      InvalidInputError: DST is not an empty or new folder.
    """
    import orbax.checkpoint as ocp

    _require_empty(dst)
    dst.mkdir(parents=True, exist_ok=True)
    _write_json(dst / "config.json", {**source.hf_config, "dtype": dtype})
    _write_json(dst / "generation_config.json", source.generation_config)
    if source.has_tokenizer:
        tokenizer = source.tokenizer()
        tokenizer.backend.save(str(dst / "tokenizer.json"))
        _write_json(dst / "tokenizer_config.json", tokenizer.config)
    # Uncompressed: weights shrink by a third at most, and restoring them would take three times as long.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(dst.absolute() / _PARAMS, args=ocp.args.PyTreeSave(_nest(params)))
    _write_json(dst / MARKER, {"format": _FORMAT, "dtype": dtype})


def _require_empty(dst: Path) -> None:
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise InvalidInputError("dst", str(dst), "a new or empty folder; nothing is overwritten")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _stored_shape(path: str, shape: tuple[int, ...], repeats: int) -> tuple[int, ...]:
    """The one-rank shape of a parameter that ranks hold with each KV head `repeats` times."""
    if ".attention.qkv." in path:  # [K', G'+2, H, ...]
        return shape[0] // repeats, (shape[1] - 2) * repeats + 2, *shape[2:]
    if path.endswith(".attention.out.weight"):  # [D, K', G', H]
        return shape[0], shape[1] // repeats, shape[2] * repeats, shape[3]
    return shape


def _for_ranks(path: str, stored: np.ndarray, shape: tuple[int, ...], repeats: int) -> np.ndarray:
    """The inverse: query heads are shared out over the copies of their KV head."""
    if repeats == 1 or ".attention.qkv." not in path:
        return stored.reshape(shape)
    host = aligned_empty(shape, stored.dtype)
    host[:, :-2] = stored[:, :-2].reshape(shape[0], shape[1] - 2, *shape[2:])
    host[::repeats, -2:] = stored[:, -2:]
    repeat_kv(host, repeats)
    return host


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": x} -> {"a": {"b": x}}"""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} -> {"a.b": x}"""
    flat: dict[str, Any] = {}
    for name, node in tree.items():
        flat |= _flatten(node, f"{prefix}{name}.") if isinstance(node, Mapping) else {prefix + name: node}
    return flat
