"""One safetensors file, read straight into the caller's arrays.

The format (https://github.com/huggingface/safetensors): an 8-byte little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, the data. Read here rather than with the safetensors package because that one
returns every tensor as a new array, where a fused parameter wants it in a slice, often in another dtype.
"""

from __future__ import annotations

import json
import math
import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.source import contiguous_pieces, read_into
from jaxserve.errors import CheckpointError

_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_CHUNK_BYTES = 1 << 21  # of data to convert at a time: stays in the L2 cache


class Entry(NamedTuple):
    """Where a tensor is: dtype, shape, and position in the file in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """An open file whose header has been checked.

    Raises:
      CheckpointError: unreadable, header broken, or shorter than its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        weakref.finalize(self, os.close, self._fd)
        self.entries = self._read_header(os.fstat(self._fd).st_size)

    def _read_header(self, file_bytes: int) -> dict[str, Entry]:
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if file_bytes < 8 or length > min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{self.path}: not a safetensors file, or truncated: the header should have {length} "
                                  f"bytes, the file has {file_bytes}")
        text = np.empty(length, np.uint8)
        read_into(self._fd, text, 8)
        try:
            header = json.loads(text.tobytes())
            header.pop("__metadata__", None)
            return {name: self._entry(name, info, 8 + length, file_bytes) for name, info in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path}: broken safetensors header: {error!r}") from error

    def _entry(self, name: str, info: dict[str, Any], start: int, file_bytes: int) -> Entry:
        if info["dtype"] not in _DTYPES:
            raise CheckpointError(f"{self.path}: tensor {name}: dtype {info['dtype']} is not supported")
        dtype, shape = np.dtype(_DTYPES[info["dtype"]]), tuple(info["shape"])
        begin, end = info["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
            raise CheckpointError(f"{self.path}: tensor {name}: {end - begin} bytes of data for "
                                  f"{info['dtype']}{list(shape)}")
        if start + end > file_bytes:
            raise CheckpointError(f"{self.path}: truncated: tensor {name} ends at byte {start + end}, "
                                  f"the file at {file_bytes}")
        return Entry(dtype, shape, start + begin)

    def read(self, name: str, out: np.ndarray) -> None:
        """Writes a tensor into `out`; see `TensorSource.read`."""
        dtype, _, offset = self.entries[name]
        for piece in contiguous_pieces(out):
            direct = piece.dtype == dtype
            step = piece.size if direct else _CHUNK_BYTES // dtype.itemsize
            for start in range(0, piece.size, max(step, 1)):
                target = piece[start : start + step]
                data = target if direct else np.empty(target.size, dtype)
                if not read_into(self._fd, data, offset):
                    raise CheckpointError(f"{self.path}: truncated inside tensor {name}")
                if not direct:
                    target[:] = data
                offset += data.nbytes
