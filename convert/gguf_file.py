"""One GGUF file: its metadata, its tensor table, and tensors dequantised into the caller's arrays.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised types are decoded by the `gguf`
package; its reader is not used, because it makes a numpy array of every string (2.2 s for a vocabulary of 49,000).
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.source import contiguous_pieces, read_into
from jaxserve.errors import CheckpointError, UnsupportedModelError

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_PLAIN: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_CHUNK_ELEMENTS = 1 << 18  # decoded at a time: one megabyte of float32, stays in the L2 cache


class Entry(NamedTuple):
    """Where a tensor is: shape as in HF (outermost first), ggml type name, block size and position in the file."""

    shape: tuple[int, ...]
    type_name: str
    block_elements: int
    block_bytes: int
    offset: int


class GGUFFile:
    """An open file whose metadata and tensor table have been read and checked.

    Attributes:
      metadata: key -> value; arrays of numbers are numpy arrays, strings are str, arrays of strings list[str].
      entries: GGUF tensor name -> Entry.

    Raises:
      CheckpointError: unreadable, not GGUF, or truncated.
      UnsupportedModelError: a GGUF version or byte order that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        weakref.finalize(self, os.close, self._fd)
        self._file_bytes = os.fstat(self._fd).st_size
        if os.pread(self._fd, 4, 0) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as data:
            self._read_header(_Cursor(data, path))

    def _read_header(self, cursor: _Cursor) -> None:
        cursor.position = 4
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError("GGUF version", version, f"2 or 3, little-endian (in {self.path})")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        table = [self._read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-cursor.position // alignment) * alignment
        self.entries = {name: entry._replace(offset=start + entry.offset) for name, entry in table}
        for name, entry in self.entries.items():
            end = entry.offset + math.prod(entry.shape) // entry.block_elements * entry.block_bytes
            if end > self._file_bytes:
                raise CheckpointError(f"{self.path}: truncated: tensor {name} ends at byte {end}, "
                                      f"the file at {self._file_bytes}")

    def _read_tensor_info(self, cursor: _Cursor) -> tuple[str, Entry]:
        name = cursor.string()
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(cursor.scalar("I"))]))
        type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # 50 ms, only for GGUF

        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name}: unknown ggml type {type_id}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block_elements:
            raise CheckpointError(f"{self.path}: tensor {name}: {list(shape)} cannot be stored as {kind.name}")
        return name, Entry(shape, kind.name, block_elements, block_bytes, offset)

    def read(self, name: str, out: np.ndarray, swap_halves: int | None = None) -> None:
        """Writes a tensor into `out`, see `TensorSource.read`.

        Args:
          swap_halves: None takes the rows as they are. A number of heads undoes llama.cpp's reordering of query and
            key rows: it stores each head's rows pairwise (0, H/2, 1, H/2 + 1, ...) where HF has (0, 1, ..., H - 1).
        """
        entry = self.entries[name]
        num_blocks = math.prod(entry.shape) // entry.block_elements
        raw = np.empty((num_blocks, entry.block_bytes), np.uint8)
        if not read_into(self._fd, raw, entry.offset):
            raise CheckpointError(f"{self.path}: truncated inside tensor {name}")
        if swap_halves:
            pairs = raw.reshape(swap_halves, entry.shape[0] // swap_halves // 2, 2, -1)
            raw = pairs.swapaxes(1, 2).reshape(num_blocks, entry.block_bytes)
        decode = _decoder(entry.type_name, self.path, name)
        step, start = _CHUNK_ELEMENTS // entry.block_elements, 0
        for piece in contiguous_pieces(out):
            blocks = piece.reshape(-1, entry.block_elements)
            for first in range(0, len(blocks), step):
                target = blocks[first : first + step]
                decode(raw[start : start + len(target)], target)
                start += len(target)


class _Cursor:
    """Reads metadata values one after another."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.position = data, path, 0

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from("<" + code, self.data, self.position)
        except struct.error:
            raise self._truncated() from None
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: unknown metadata type {kind} before byte {self.position}")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item not in _SCALARS:
            raise CheckpointError(f"{self.path}: unknown metadata array type {item} before byte {self.position}")
        dtype = np.dtype("<" + _SCALARS[item]) if item != 7 else np.dtype(np.bool_)
        begin, self.position = self.position, self.position + count * dtype.itemsize
        if self.position > len(self.data):
            raise self._truncated()
        return np.frombuffer(self.data[begin : self.position], dtype)

    def _strings(self, count: int) -> list[str]:
        """A tight loop: a vocabulary and its merges are 100,000 to 500,000 strings."""
        data, position, unpack, values = self.data, self.position, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                end = position + 8 + unpack(data, position)[0]
                values.append(data[position + 8 : end].decode())
                position = end
        except (struct.error, OverflowError):
            raise self._truncated() from None
        except UnicodeDecodeError as error:
            if end > len(data):
                raise self._truncated() from None
            raise CheckpointError(f"{self.path}: a metadata string at byte {position} is not UTF-8") from error
        if position > len(data):
            raise self._truncated()
        self.position = position
        return values

    def _truncated(self) -> CheckpointError:
        return CheckpointError(f"{self.path}: truncated: the metadata or tensor table goes on past the end of the file")


def _decoder(type_name: str, path: Path, name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """decode(raw [blocks, block_bytes] uint8, out [blocks, block_elements]) of a ggml type."""
    if type_name in _PLAIN:
        return lambda raw, out: np.copyto(out, raw.view(_PLAIN[type_name]), casting="unsafe")
    if type_name in _FAST:
        return _via_float32(_FAST[type_name])
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]

    def decode(raw: np.ndarray, out: np.ndarray) -> None:
        try:
            out[:] = dequantize(raw.reshape(1, -1), kind).reshape(out.shape)  # one row: it would loop over more
        except NotImplementedError:
            raise CheckpointError(f"{path}: tensor {name}: ggml type {type_name} cannot be read") from None

    return decode


def _via_float32(decode: Callable[[np.ndarray, np.ndarray], None]) -> Callable[[np.ndarray, np.ndarray], None]:
    def into(raw: np.ndarray, out: np.ndarray) -> None:
        decoded = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        decode(raw, decoded)
        if decoded is not out:
            out[:] = decoded

    return into


def _halves(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    packed = np.ascontiguousarray(packed)
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q4_0(raw: np.ndarray, out: np.ndarray) -> None:
    _nibbles(raw[:, 2:], out)
    out -= 8
    out *= _halves(raw[:, :2])


def _q4_1(raw: np.ndarray, out: np.ndarray) -> None:
    scale_min = _halves(raw[:, :4])
    _nibbles(raw[:, 4:], out)
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _q8_0(raw: np.ndarray, out: np.ndarray) -> None:
    out[:] = raw[:, 2:].view(np.int8)
    out *= _halves(raw[:, :2])


# The simplest types, twice as fast as in the package and without its temporaries, hence in parallel too.
_FAST = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
