"""Hugging Face folders: every layout on disk gives the same parameters, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from convert.load import aligned_empty, from_named
from convert.source import TensorSource, open_source
from jaxserve.models.params import abstract_params
from jaxserve.models.registry import model_config_from_hf
from tests.convert.checkpoints import assert_same, expected_params, load, save_hf

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}), "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama odd head width": ("Llama", {"head_dim": 20}), "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", FAMILIES)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_parameters_equal_the_models(tmp_path: Path, case: str, max_shard_size: str) -> None:
    family, options = FAMILIES[case]
    weights = save_hf(tmp_path, family, max_shard_size=max_shard_size, **options)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "20KB")
    params = load(tmp_path)
    assert_same(params, expected_params(tmp_path, weights))
    assert all(isinstance(array, jax.Array) for array in params.values())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes_convert_as_in_torch(tmp_path: Path, stored: str, wanted: str) -> None:
    save_hf(tmp_path, dtype=getattr(torch, stored))
    source = open_source(tmp_path)
    assert isinstance(source, TensorSource)
    embedding = torch.from_numpy(dict(source.tensors())["model.embed_tokens.weight"].astype(np.float32))
    param = load(tmp_path, dtype=wanted)["embed.weight"]
    assert param.dtype == wanted and source.dtype_of("lm_head.weight") == stored
    torch.testing.assert_close(torch.from_numpy(np.asarray(param).astype(np.float32)),
                               embedding.to(getattr(torch, wanted)).float(), rtol=0, atol=0)


def test_tensors_come_under_their_own_names(tmp_path: Path) -> None:
    weights = save_hf(tmp_path, max_shard_size="20KB")
    source = open_source(tmp_path)
    assert isinstance(source, TensorSource)
    assert source.names_and_shapes() == {name: weight.shape for name, weight in weights.items()}
    assert_same(dict(source.tensors()), weights)


def test_a_saved_head_and_old_buffers_of_a_tied_model_are_ignored(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = save_hf(tmp_path, tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(6, np.float32)
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(load(tmp_path), expected_params(tmp_path, weights))


def test_several_files_without_an_index(tmp_path: Path) -> None:
    weights = save_hf(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_same(load(tmp_path), expected_params(tmp_path, weights))


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 2, 4), (8, 2, 8), (4, 1, 2), (8, 4, 2), (6, 2, 6)])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_kv_heads_are_repeated_for_ranks_beyond_them(tmp_path: Path, family: str, heads: int, kv_heads: int,
                                                     ranks: int) -> None:
    """Fault H21: each rank holds whole heads, and the KV head that its query heads use."""
    weights = save_hf(tmp_path, family, hidden_size=8 * heads, intermediate_size=96, num_attention_heads=heads,
                      num_key_value_heads=kv_heads)
    params = load(tmp_path, tensor_parallel_size=ranks)
    per_rank = heads // ranks
    for leaf in ("weight", "bias") if family == "Qwen2" else ("weight",):
        q, k, v = (weights[f"model.layers.1.self_attn.{name}_proj.{leaf}"] for name in "qkv")
        q, k, v = (x.reshape(-1, 8, *x.shape[1:]) for x in (q, k, v))
        fused = np.asarray(params[f"layers.1.attention.qkv.{leaf}"])
        for rank, part in enumerate(np.split(fused, ranks)):
            mine = [head * kv_heads // heads for head in range(rank * per_rank, (rank + 1) * per_rank)]
            np.testing.assert_array_equal(part[:, :-2].reshape(per_rank, *q.shape[1:]),
                                          q[rank * per_rank : (rank + 1) * per_rank])
            np.testing.assert_array_equal(part[:, -2], k[sorted(set(mine))])
            np.testing.assert_array_equal(part[:, -1], v[sorted(set(mine))])


def test_weights_in_memory_follow_the_same_rules(tmp_path: Path) -> None:
    weights = save_hf(tmp_path, "Qwen2")
    config = model_config_from_hf(open_source(tmp_path).hf_config)
    mixed = {name: jnp.asarray(weight) if "mlp" in name else weight for name, weight in weights.items()}
    params = from_named(mixed, config, abstract_params(config))
    assert_same(params, expected_params(tmp_path, weights))
    embedding = np.asarray(params["embed.weight"]).copy()
    weights["model.embed_tokens.weight"][:] = 0  # copied, so the caller may go on using its own
    np.testing.assert_array_equal(params["embed.weight"], embedding)


def test_put_gets_full_host_arrays_in_the_final_dtype(tmp_path: Path) -> None:
    save_hf(tmp_path, dtype=torch.float16)
    seen: dict[str, np.ndarray] = {}

    def put(path: str, host: np.ndarray) -> jax.Array:
        seen[path] = host
        return jnp.zeros(())

    params = load(tmp_path, dtype="bfloat16", put=put)
    assert seen.keys() == params.keys() and all(array.shape == () for array in params.values())
    assert all(host.dtype == ml_dtypes.bfloat16 and host.flags.c_contiguous for host in seen.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_arrays_are_taken_over_without_a_copy(dtype: str) -> None:
    host = aligned_empty((333, 77), dtype)
    host[:] = 1
    array = jax.device_put(host)
    assert array.unsafe_buffer_pointer() == host.ctypes.data


def test_tokenizer_and_generation_config(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    save_hf(tmp_path)
    assert not open_source(tmp_path).has_tokenizer
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b", "chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = open_source(tmp_path)
    tokenizer = source.tokenizer()
    assert source.has_tokenizer and source.generation_config == {"eos_token_id": [1, 2]}
    assert tokenizer.backend.encode("abba").ids == [2, 1, 0] and tokenizer.config["eos_token"] == "b"
    assert "{{ messages }}" in str(tokenizer.config["chat_template"])
