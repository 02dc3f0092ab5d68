"""A checkpoint that is broken, incomplete or of the wrong kind is refused with file and tensor named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.source import open_source
from jaxserve.errors import CheckpointError, InvalidInputError, ModelNotFoundError
from tests.convert.checkpoints import load, save_hf

Change = Callable[[dict[str, np.ndarray]], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def change_weights(folder: Path, change: Change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def test_everything_that_does_not_fit_is_in_one_message(tmp_path: Path) -> None:
    save_hf(tmp_path)

    def change(weights: dict[str, np.ndarray]) -> None:
        del weights["model.norm.weight"], weights["model.layers.1.self_attn.k_proj.weight"]
        weights["model.layers.0.mlp.up_proj.weight"] = np.zeros((80, 47), np.float32)
        weights["model.layers.0.self_attn.q_proj.weight"] = np.zeros((24, 48), np.float32)
        weights["model.layers.0.mlp.experts.3"] = np.zeros((2, 3), np.float32)

    change_weights(tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "missing (2)" in message and "model.norm.weight [48]" in message
    assert "model.layers.1.self_attn.k_proj.weight [24, 48]" in message
    assert "of the wrong shape (2)" in message
    assert "model.layers.0.mlp.up_proj.weight: expected [80, 48], found [80, 47]" in message
    assert "model.layers.0.self_attn.q_proj.weight: expected [48, 48], found [24, 48]" in message
    assert "unexpected (1): model.layers.0.mlp.experts.3 [2, 3]" in message


def test_long_lists_are_capped(tmp_path: Path) -> None:
    save_hf(tmp_path)
    extra = {f"extra.{i}": np.zeros(1, np.float32) for i in range(500)}
    change_weights(tmp_path, lambda weights: weights.update(extra))
    with pytest.raises(CheckpointError, match=r"unexpected \(500\).*and 480 more") as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 2000


def test_an_untied_model_without_a_head_and_a_tied_file_for_an_untied_config(tmp_path: Path) -> None:
    save_hf(tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head.weight \[97, 48\]"):
        load(tmp_path)


def rewrite_header(folder: Path, change: Callable[[dict], object]) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def overwrite(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty file": (lambda folder: cut(folder / WEIGHTS, 0), "not a safetensors file"),
    "shorter than a length": (lambda folder: cut(folder / WEIGHTS, 5), "not a safetensors file"),
    "header cut": (lambda folder: cut(folder / WEIGHTS, 200), "not a safetensors file, or truncated"),
    "header length absurd": (lambda folder: overwrite(folder / WEIGHTS, 0, b"\xff" * 8), "not a safetensors file"),
    "header not JSON": (lambda folder: overwrite(folder / WEIGHTS, 8, b"#####"), "broken safetensors header"),
    "header without fields": (lambda folder: rewrite_header(folder, lambda h: h["lm_head.weight"].pop("shape")),
                              "broken safetensors header"),
    "data cut": (lambda folder: cut(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 4),
                 "truncated: tensor model.norm.weight"),
    "shape and size differ": (
        lambda folder: rewrite_header(folder, lambda h: h["lm_head.weight"].update(shape=[97, 49])),
        "tensor lm_head.weight: 18624 bytes of data for F32[97, 49]"),
    "unknown dtype": (lambda folder: rewrite_header(folder, lambda h: h["lm_head.weight"].update(dtype="F3")),
                      "tensor lm_head.weight: dtype F3 is not supported"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_broken_safetensors(tmp_path: Path, case: str) -> None:
    save_hf(tmp_path)
    break_it, message = BREAKS[case]
    break_it(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert message in str(caught.value) and str(tmp_path / WEIGHTS) in str(caught.value)


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    save_hf(tmp_path)
    source = open_source(tmp_path)
    source.names_and_shapes()  # type: ignore[attr-defined]
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"truncated inside tensor lm_head\.weight"):
        source.read("lm_head.weight", np.empty((97, 48), np.float32))  # type: ignore[attr-defined]


def test_shards_that_do_not_match_their_index(tmp_path: Path) -> None:
    save_hf(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    lost = {**index["weight_map"], "model.layers.7.mlp.up_proj.weight": shard}
    (tmp_path / INDEX).write_text(json.dumps({**index, "weight_map": lost}))
    with pytest.raises(CheckpointError, match=rf"{shard}: lacks tensors .*: model.layers.7.mlp.up_proj.weight"):
        load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=rf"{INDEX}: lists files that are not there: {shard} \(tensor "):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(tmp_path: Path, content: str) -> None:
    save_hf(tmp_path, max_shard_size="20KB")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=f"{INDEX}: no weight_map"):
        load(tmp_path)


@pytest.mark.parametrize(("content", "message"), [
    (b'{\n  "a": 1,\n  "b" 2\n}', "invalid JSON at line 3, column 7"), (b"", "invalid JSON at line 1, column 1"),
    (b"\xff\xfe{}", "invalid JSON"), (b'{"a": "\xff"}', "not UTF-8"), (b"[1]", "holds a JSON list, not an object"),
])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    save_hf(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path)
    assert message in str(caught.value) and str(tmp_path / file) in str(caught.value)


def test_a_broken_tokenizer(tmp_path: Path) -> None:
    save_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_source(tmp_path).tokenizer()


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a folder or a \.gguf file that exists"):
        open_source(tmp_path / "nothing")
    with pytest.raises(ModelNotFoundError, match=r"config\.json and \*\.safetensors .* exactly one \*\.gguf"):
        open_source(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        open_source(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    save_hf(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotFoundError, match="pickles"):
        open_source(tmp_path)


def test_ranks_that_cannot_share_the_heads(tmp_path: Path) -> None:
    save_hf(tmp_path)
    with pytest.raises(InvalidInputError, match="tensor_parallel_size=3"):
        load(tmp_path, tensor_parallel_size=3)
