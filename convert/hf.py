"""A Hugging Face folder: config.json, safetensors (one file or shards with an index), tokenizer.json and its kin."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from pathlib import Path

import numpy as np

from convert.safetensors import SafetensorsFile
from convert.source import TensorSource, TokenizerData, read_json
from jaxserve.errors import CheckpointError, ModelNotFoundError
from jaxserve.text.pretrained import read_tokenizer_folder

_INDEX = "model.safetensors.index.json"


class HFSource(TensorSource):
    """See `TensorSource`. Weights are opened when first asked for, so that a bad config is reported before them.

    Raises:
      ModelNotFoundError: no safetensors in the folder.
      CheckpointError: config.json or generation_config.json is broken.
    """

    def __init__(self, folder: Path):
        self.name, self._folder = str(folder), folder
        self.hf_config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        if not (folder / _INDEX).exists() and not any(folder.glob("*.safetensors")):
            pickles = ("; its *.bin files are pickles and are not read: save it again with safe_serialization"
                       if any(folder.glob("*.bin")) else "")
            raise ModelNotFoundError("model", self.name,
                                     f"a folder with {_INDEX} or *.safetensors beside config.json{pickles}")

    @cached_property
    def _files(self) -> dict[str, SafetensorsFile]:
        """HF name -> the file that has the tensor."""
        if not (self._folder / _INDEX).exists():
            found: dict[str, SafetensorsFile] = {}
            single = self._folder / "model.safetensors"
            for path in [single] if single.exists() else sorted(self._folder.glob("*.safetensors")):
                file = SafetensorsFile(path)
                found.update(dict.fromkeys(file.entries, file))
            return found
        return self._indexed_files()

    def _indexed_files(self) -> dict[str, SafetensorsFile]:
        index = self._folder / _INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map from tensor names to files")
        names_by_shard = defaultdict(list)
        for name, shard in weight_map.items():
            names_by_shard[shard].append(name)
        absent = [shard for shard in names_by_shard if not (self._folder / shard).is_file()]
        if absent:
            example = names_by_shard[absent[0]][0]
            raise CheckpointError(f"{index}: lists files that are not there: {', '.join(sorted(absent)[:10])} "
                                  f"(tensor {example} and {sum(len(names_by_shard[s]) for s in absent) - 1} more)")
        found = {}
        for shard, names in names_by_shard.items():
            file = SafetensorsFile(self._folder / shard)
            lost = [name for name in names if name not in file.entries]
            if lost:
                raise CheckpointError(f"{file.path}: lacks tensors that {_INDEX} says it has: {', '.join(lost[:10])}"
                                      + (f" and {len(lost) - 10} more" if len(lost) > 10 else ""))
            found.update(dict.fromkeys(names, file))
        return found

    def names_and_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[name].shape for name, file in self._files.items()}

    def dtype_of(self, name: str) -> np.dtype:
        return self._files[name].entries[name].dtype

    def read(self, name: str, out: np.ndarray) -> None:
        self._files[name].read(name, out)

    @property
    def has_tokenizer(self) -> bool:
        return any((self._folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))

    def tokenizer(self) -> TokenizerData:
        folder = read_tokenizer_folder(self._folder)
        template = {"chat_template": folder.chat_template} if folder.chat_template else {}
        return TokenizerData(folder.backend, {**folder.config, **template})
