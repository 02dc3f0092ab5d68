"""From a source's tensors to the model's parameters, one parameter at a time.

Each parameter gets one host array of its final dtype; its HF tensors are read straight into their slots of it, and it
goes to the device as soon as it is full. So the host never holds more than what `put` keeps, plus the parameters in
work (one a thread). On the CPU `put` keeps the array itself: `jax.device_put` takes over a 64-byte aligned numpy array
without copying it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from convert.rules import Part, hf_shape, kv_repeats, repeat_kv, slot, tensors_of, unexpected
from convert.source import Source, TensorSource, TokenizerData, contiguous_pieces
from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError

_ALIGNMENT = 64  # bytes: what XLA:CPU asks of a buffer before it takes it over
_MAX_THREADS = 4
_MAX_LISTED = 20  # names of a kind in one error message


class ParamSpec(Protocol):
    """What the loader has to know of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


Put = Callable[[str, np.ndarray], jax.Array]
Tensors = dict[str, list[tuple[str, Part]]]


def load_params(
    source: Source, config: ModelConfig, expected: Mapping[str, ParamSpec], *,
    tensor_parallel_size: int = 1, dtype: Any = None, put: Put | None = None,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, jax.Array]:
    """Reads all parameters of a model.

    Args:
      expected: dotted path -> the parameter's spec, shaped for `tensor_parallel_size` (KV heads repeated if needed).
      dtype: of the floating-point result; None takes each spec's own.
      put: moves a full host array to its device(s); it may keep the array. None uses jax.device_put with `shardings`.
      shardings: dotted path -> sharding; a converted checkpoint is then restored straight into it.

    Returns:
      dotted path -> array, in the order of `expected`.

    Raises:
      CheckpointError: tensors are missing, unexpected or misshapen (all of them in one message), or unreadable.
      InvalidInputError: the heads cannot be divided over the ranks.
    """
    if not isinstance(source, TensorSource):
        from convert.checkpoint import ConvertedSource  # here: it uses this module

        assert isinstance(source, ConvertedSource)
        return source.load_params(config, expected, tensor_parallel_size=tensor_parallel_size, dtype=dtype, put=put,
                                  shardings=shardings)
    put = put or default_put(shardings)
    repeats = kv_repeats(config, tensor_parallel_size)
    tensors = check_names_and_shapes(source, config, expected)

    def load_one(path: str) -> jax.Array:
        spec = expected[path]
        host = aligned_empty(spec.shape, dtype or spec.dtype)
        for name, part in tensors[path]:
            source.read(name, slot(host, part, repeats))
        if ".qkv." in path:
            repeat_kv(host, repeats)
        # Blocking keeps a fast disk from piling up host arrays in front of a slow device.
        return jax.block_until_ready(put(path, host))

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "load", _let_others_first) as threads:
        futures = {path: threads.submit(load_one, path) for path in expected}
        try:
            return {path: future.result() for path, future in futures.items()}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _let_others_first() -> None:
    """The program for a first prompt, if it is being loaded meanwhile, is ready last of all as it is."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def from_named(
    named: Mapping[str, Any], config: ModelConfig, expected: Mapping[str, ParamSpec], *,
    tensor_parallel_size: int = 1, dtype: Any = None, put: Put | None = None,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, jax.Array]:
    """`load_params` from arrays (numpy or jax) under HF names that are already in memory; they are copied."""
    return load_params(NamedSource(named, config.hf_config), config, expected, dtype=dtype, put=put,
                       shardings=shardings, tensor_parallel_size=tensor_parallel_size)


class NamedSource(TensorSource):
    """Arrays in memory as a source."""

    def __init__(self, named: Mapping[str, Any], hf_config: dict[str, Any]):
        self.name, self.hf_config, self.generation_config = "the given weights", hf_config, {}
        self._named = named

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(array.shape) for name, array in self._named.items()}

    def dtype_of(self, name: str) -> np.dtype:
        return np.dtype(self._named[name].dtype)

    def read(self, name: str, out: np.ndarray) -> None:
        flat, start = np.asarray(self._named[name]).reshape(-1), 0
        for piece in contiguous_pieces(out):
            piece[:] = flat[start : start + piece.size]
            start += piece.size

    @property
    def has_tokenizer(self) -> bool:
        return False

    def tokenizer(self) -> TokenizerData:
        raise CheckpointError("weights given by name bring no tokenizer")


def check_names_and_shapes(source: TensorSource, config: ModelConfig, expected: Mapping[str, ParamSpec]) -> Tensors:
    """Which tensors make up each expected parameter, once all of them are known to be there and to fit.

    Raises:
      CheckpointError: listing everything that is missing, misshapen or unexpected.
    """
    found = source.names_and_shapes()
    tensors = {path: tensors_of(path) for path in expected}
    wanted = {name: hf_shape(tuple(expected[path].shape), part, config)
              for path, parts in tensors.items() for name, part in parts}
    unfilled = [path for path, parts in tensors.items() if not parts]
    report(source.name, wanted, found, unexpected(found, wanted, config), unfilled)
    return tensors


def report(where: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]],
           unexpected_names: list[str], unfilled: Sequence[str] = ()) -> None:
    """Raises one CheckpointError for everything that does not fit, or nothing."""
    problems = {
        "parameters that no rule fills": list(unfilled),
        "missing": [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in found],
        "of the wrong shape": [f"{name}: expected {list(shape)}, found {list(found[name])}"
                               for name, shape in wanted.items() if name in found and found[name] != shape],
        "unexpected": [f"{name} {list(found[name])}" for name in unexpected_names],
    }
    lines = [f"{what} ({len(names)}): {_listed(names)}" for what, names in problems.items() if names]
    if lines:
        raise CheckpointError(f"{where} does not match its config; " + "; ".join(lines))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that jax.device_put can take over on the CPU."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def default_put(shardings: Mapping[str, jax.sharding.Sharding] | None) -> Put:
    return lambda path, host: jax.device_put(host, shardings[path] if shardings else None)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
