"""What every kind of checkpoint looks like to the loader, and how one is recognised."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import CheckpointError, ModelNotFoundError

if TYPE_CHECKING:
    import tokenizers

MARKER = "jaxserve_checkpoint.json"


@dataclass(frozen=True)
class TokenizerData:
    """A tokenizer as stored with a checkpoint.

    Attributes:
      backend: the text <-> ids part. Encoding with add_special_tokens=True adds BOS/EOS where the model wants them.
      config: like HF's tokenizer_config.json: bos_token, eos_token, unk_token, pad_token, chat_template, ...
    """

    backend: tokenizers.Tokenizer
    config: dict[str, Any]


class Source(ABC):
    """A checkpoint, whatever it looks like on disk.

    Attributes:
      name: where it is, for messages.
      hf_config: config.json's content, or its reconstruction.
      generation_config: generation_config.json's content ({} if there is none); eos_token_id is what ends a text.
    """

    name: str
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether `tokenizer()` can be asked for."""

    @abstractmethod
    def tokenizer(self) -> TokenizerData:
        """The checkpoint's tokenizer.

        Raises:
          CheckpointError: it is broken.
          ModelNotFoundError: there is none.
          UnsupportedModelError: it is of a kind that cannot be rebuilt.
        """


class TensorSource(Source):
    """A checkpoint that gives its tensors under Hugging Face names, one at a time and in any order."""

    @abstractmethod
    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        """HF name -> shape of every tensor, without reading data.

        Raises:
          CheckpointError: a file is missing, broken or too short.
        """

    @abstractmethod
    def dtype_of(self, name: str) -> np.dtype:
        """The dtype that holds the stored tensor without loss (float32 for quantised ones)."""

    @abstractmethod
    def read(self, name: str, out: np.ndarray) -> None:
        """Writes one tensor, row-major and converted to `out.dtype`, into `out`.

        `out` has as many elements as the tensor; it may be a strided view as long as its contiguous stretches are whole
        rows of the tensor. May be called from several threads.

        Raises:
          CheckpointError: the data cannot be read; the message names file and tensor.
        """

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors under their HF names, each read when its turn comes."""
        for name, shape in self.names_and_shapes().items():
            array = np.empty(shape, self.dtype_of(name))
            self.read(name, array)
            yield name, array


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a checkpoint: an HF folder, a GGUF file (or a folder with one), or a folder made by `jaxserve convert`.

    Raises:
      ModelNotFoundError: nothing there, or nothing that is a checkpoint.
      CheckpointError: there is one, but it is broken.
      UnsupportedModelError: a GGUF file of an architecture that is not implemented.
    """
    from convert.gguf import GGUFSource  # here: each kind imports this module
    from convert.hf import HFSource

    place = Path(path).expanduser()
    if place.is_file():
        return GGUFSource(place)
    if not place.is_dir():
        raise ModelNotFoundError("model", str(path), "a folder or a .gguf file that exists")
    if (place / MARKER).exists():
        from convert.checkpoint import ConvertedSource

        return ConvertedSource(place)
    ggufs = sorted(place.glob("*.gguf"))
    if len(ggufs) == 1 and not any(place.glob("*.safetensors*")):
        return GGUFSource(ggufs[0])
    if (place / "config.json").exists():
        return HFSource(place)
    if len(ggufs) > 1:
        raise ModelNotFoundError("model", str(path), "one of the folder's GGUF files, named with its path: "
                                 + ", ".join(file.name for file in ggufs[:10]))
    raise ModelNotFoundError("model", str(path), "a folder with config.json and *.safetensors (Hugging Face), or with "
                             f"exactly one *.gguf, or with {MARKER} (made by jaxserve convert); none of them is there")


def contiguous_pieces(out: np.ndarray) -> Iterator[np.ndarray]:
    """Flat views that together are `out` in row-major order, as few as its strides allow."""
    if out.flags.c_contiguous:
        yield out.reshape(-1)
    else:
        for part in out:
            yield from contiguous_pieces(part)


def read_into(fd: int, buffer: np.ndarray, offset: int) -> bool:
    """Fills a contiguous array from a file position; False if the file ends too early.

    Plain reads, not a memory map: mapped pages count as the process's memory, and a file cut short under a map kills
    the process.
    """
    view = memoryview(buffer.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    while view:
        count = os.preadv(fd, [view], offset)
        if count == 0:
            return False
        view, offset = view[count:], offset + count
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      CheckpointError: not readable, not JSON (the message says where), or not an object.
    """
    import json

    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: invalid JSON at line {error.lineno}, column {error.colno}: "
                              f"{error.msg}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: invalid JSON: not UTF-8 text (byte {error.start})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content
