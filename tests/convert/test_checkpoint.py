"""The converted form: what comes back is what went in, bit for bit, for any dtype, sharding and number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.checkpoint import convert_checkpoint
from convert.source import MARKER, open_source
from jaxserve.errors import CheckpointError, InvalidInputError
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf
from tests.convert.checkpoints import assert_same, load, save_hf, tiny_checkpoint
from tests.convert.ggufs import write_gguf

EIGHT_HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    save_hf(tmp_path / "hf", "Qwen2", dtype=getattr(torch, dtype), tie_word_embeddings=True)
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    params = load(tmp_path / "out", dtype=dtype)
    assert all(array.dtype == dtype for array in params.values())
    assert_same(params, load(tmp_path / "hf", dtype=dtype))
    given, kept = open_source(tmp_path / "hf"), open_source(tmp_path / "out")
    assert model_config_from_hf(kept.hf_config) == model_config_from_hf(given.hf_config)
    assert kept.generation_config == given.generation_config


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_dtype_asked_for(tmp_path: Path, stored: str) -> None:
    save_hf(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out", dtype=stored)
    assert open_source(tmp_path / "out").hf_config["dtype"] == stored
    expected = {path: array.astype(stored).astype("bfloat16") for path, array in load(tmp_path / "hf").items()}
    assert_same(load(tmp_path / "out", dtype="bfloat16"), expected)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_stored_for_one_rank_loaded_for_several(tmp_path: Path, ranks: int) -> None:
    save_hf(tmp_path / "hf", "Qwen2", **EIGHT_HEADS)
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert_same(load(tmp_path / "out", tensor_parallel_size=ranks), load(tmp_path / "hf", tensor_parallel_size=ranks))


SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf
from jaxserve.runner.sharding import param_sharding
from convert.load import load_params
from convert.source import open_source

folder = Path(sys.argv[1])
for ranks in (2, 4):
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:ranks]), ("tensor",))
    loaded = []
    for name in ("hf", "out"):
        source = open_source(folder / name)
        config = model_config_from_hf(source.hf_config)
        expected = abstract_params(config, tensor_parallel_size=ranks)
        shardings = {path: param_sharding(mesh, spec.shape, spec.axes) for path, spec in expected.items()}
        params = load_params(source, config, expected, tensor_parallel_size=ranks, shardings=shardings)
        assert all(array.sharding.is_equivalent_to(shardings[path], array.ndim) for path, array in params.items())
        qkv = params["layers.0.attention.qkv.weight"]
        assert len(qkv.addressable_shards) == ranks and qkv.addressable_shards[0].data.shape[0] * ranks == qkv.shape[0]
        loaded.append(params)
    for path in loaded[0]:
        np.testing.assert_array_equal(loaded[0][path], loaded[1][path])
print("same")
"""


def test_restored_straight_into_shards(tmp_path: Path) -> None:
    save_hf(tmp_path / "hf", **EIGHT_HEADS)
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    result = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert result.stdout == "same\n", result.stderr


def test_put_is_used_when_given(tmp_path: Path) -> None:
    save_hf(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    seen = {}

    def put(path: str, host: np.ndarray) -> jax.Array:
        seen[path] = host
        return jnp.zeros(())

    load(tmp_path / "out", put=put)
    assert_same(seen, load(tmp_path / "hf"))


def test_gguf_with_its_tokenizer(tmp_path: Path) -> None:
    model, hf = tiny_checkpoint("Llama")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    keys = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab", "<e>"], "merges": ["a b"],
            "token_type": [1, 1, 1, 3], "eos_token_id": 3, "add_eos_token": True}
    extra = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    write_gguf(tmp_path / "model.gguf", weights, {**model.config.to_dict(), **hf},
               extra={**extra, "tokenizer.chat_template": "{{ messages }} — ü"})
    convert_checkpoint(tmp_path / "model.gguf", tmp_path / "out")
    assert_same(load(tmp_path / "out"), load(tmp_path / "model.gguf"))
    before, after = open_source(tmp_path / "model.gguf"), open_source(tmp_path / "out")
    assert after.generation_config == before.generation_config == {"eos_token_id": [3]}
    assert after.tokenizer().config == before.tokenizer().config
    assert after.tokenizer().backend.to_str() == before.tokenizer().backend.to_str()
    assert after.tokenizer().backend.encode("ab<e>a").ids == [2, 3, 0, 3]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    save_hf(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(InvalidInputError, match=r"dst=.*a new or empty folder"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["precious"]
    with pytest.raises(InvalidInputError, match=r"dst=.*a new or empty folder"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "out" / "precious")
    with pytest.raises(InvalidInputError, match="dtype='int4'"):
        convert_checkpoint(tmp_path / "hf", tmp_path / "new", dtype="int4")
    (tmp_path / "out" / "precious").unlink()
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(InvalidInputError, match="converted already"):
        convert_checkpoint(tmp_path / "out", tmp_path / "again")


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    save_hf(tmp_path / "hf")
    convert_checkpoint(tmp_path / "hf", tmp_path / "out")
    return tmp_path / "out"


def test_an_array_is_missing_or_misshapen(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "vocab_size": 98}))
    with pytest.raises(CheckpointError) as caught:
        load(converted)
    assert "missing (" in str(caught.value) and "layers.2.mlp.down.weight [48, 80]" in str(caught.value)
    assert "embed.weight: expected [98, 48], found [97, 48]" in str(caught.value)
    (converted / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): lm_head.weight \[97, 48\]"):
        load(converted)


def remove_data(folder: Path) -> None:
    for file in (folder / "params").rglob("d/*"):
        file.unlink()


def cut_data(folder: Path) -> None:
    for file in (folder / "params").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove_arrays(folder: Path) -> None:
    """The list of arrays stays."""
    for file in folder.glob("params/ocdbt.process_0/d/*"):
        file.unlink()


def remove_params(folder: Path) -> None:
    shutil.rmtree(folder / "params")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads, after its error
@pytest.mark.parametrize(("break_it", "message"), [
    (remove_arrays, r'cannot be restored: .*"\S+\.weight/'), (remove_data, "its list of arrays is missing or broken"),
    (cut_data, "its list of arrays is missing or broken"), (remove_params, "not a readable Orbax checkpoint"),
])
def test_lost_or_broken_orbax_files(converted: Path, break_it: Any, message: str) -> None:
    break_it(converted)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(converted)
    assert str(converted / "params") in str(caught.value)


@pytest.mark.parametrize(("file", "content", "message"), [
    (MARKER, '{"format": 99}', "format 99 is not known; this version reads 1"), (MARKER, "{", "invalid JSON"),
    ("config.json", "{", "invalid JSON"), ("config.json", None, "cannot be read: No such file"),
])
def test_broken_folder(converted: Path, file: str, content: str | None, message: str) -> None:
    (converted / file).unlink()
    if content is not None:
        (converted / file).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_source(converted)
    assert message in str(caught.value) and str(converted / file) in str(caught.value)


def test_orbax_alone_reads_it(converted: Path) -> None:
    """Nested along the dotted paths, so that other JAX programs can restore it without jaxserve."""
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointer().restore(converted / "params")
    expected = abstract_params(model_config_from_hf(open_source(converted).hf_config))
    assert tree["layers"]["1"]["attention"]["qkv"]["weight"].shape == expected["layers.1.attention.qkv.weight"].shape
