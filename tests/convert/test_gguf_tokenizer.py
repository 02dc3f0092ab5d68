"""Tokenizers rebuilt from GGUF metadata give llama.cpp's ids (see data/make_llama_cpp_ids.py for the tables)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.gguf_file import GGUFFile
from convert.gguf_tokenizer import build_tokenizer
from convert.source import open_source
from jaxserve.errors import CheckpointError, UnsupportedModelError
from tests.convert.checkpoints import tiny_checkpoint
from tests.convert.ggufs import write_gguf


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2: Path) -> dict[str, Any]:
    return GGUFFile(smollm2).metadata


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"])
def test_byte_level_ids_equal_llama_cpps(smollm2_metadata: dict[str, Any], texts: list[str], pre: str,
                                         llama_cpp_ids: dict[str, Any]) -> None:
    backend = build_tokenizer({**smollm2_metadata, "tokenizer.ggml.pre": pre}, "here").backend
    assert len(texts) > 100
    for text, expected in zip(texts, llama_cpp_ids["byte_level"][pre], strict=True):
        assert backend.encode(text, add_special_tokens=False).ids == expected, repr(text)


def test_smollm2_tokenizer(smollm2: Path, texts: list[str], llama_cpp_ids: dict[str, Any]) -> None:
    """As the file has it: the smollm pre-tokenizer, no BOS, special tokens found in text, every text restored."""
    source = open_source(smollm2)
    tokenizer = source.tokenizer()
    assert source.has_tokenizer
    for text, expected in zip(texts, llama_cpp_ids["byte_level"]["smollm"], strict=True):
        ids = tokenizer.backend.encode(text).ids
        assert ids == expected, repr(text)
        assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.backend.decode([1, 19556, 2]) == "Hello"
    template = tokenizer.config.pop("chat_template")
    assert "<|im_start|>" in template
    assert tokenizer.config == {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
        "add_bos_token": False, "add_eos_token": False}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_llama_cpps(texts: list[str], llama_cpp_ids: dict[str, Any], prefix: bool) -> None:
    backend = build_tokenizer(sentencepiece(llama_cpp_ids, add_space_prefix=prefix), "here").backend
    for text, expected in zip(texts, llama_cpp_ids["sentencepiece"]["prefix" if prefix else "no_prefix"], strict=True):
        assert backend.encode(text).ids == expected, repr(text)


def sentencepiece(llama_cpp_ids: dict[str, Any], **more: Any) -> dict[str, Any]:
    vocab = {key: np.asarray(value) if key != "tokens" else value
             for key, value in llama_cpp_ids["sentencepiece"]["vocab"].items()}
    keys = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **vocab, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_sentencepiece_text_is_restored(llama_cpp_ids: dict[str, Any]) -> None:
    backend = build_tokenizer(sentencepiece(llama_cpp_ids), "here").backend
    for text in ("hello world", "  the  thing", "日本語 😀", "x\n\ny", " leading"):
        assert backend.decode(backend.encode(text).ids) == text


def test_merges_given_beside_scores_are_used(llama_cpp_ids: dict[str, Any]) -> None:
    metadata = sentencepiece(llama_cpp_ids, scores=None, merges=["h e", "l l", "▁ he"])
    assert build_tokenizer(metadata, "here").backend.encode("hell", add_special_tokens=False).tokens == ["▁he", "ll"]


@pytest.mark.parametrize(("keys", "expected"), [
    ({}, ["<s>", "▁the"]), ({"add_bos_token": False}, ["▁the"]), ({"add_eos_token": True}, ["<s>", "▁the", "</s>"]),
    ({"add_bos_token": False, "add_eos_token": True}, ["▁the", "</s>"]), ({"bos_token_id": None}, ["▁the"]),
])
def test_begin_and_end_of_text(llama_cpp_ids: dict[str, Any], keys: dict[str, Any], expected: list[str]) -> None:
    backend = build_tokenizer(sentencepiece(llama_cpp_ids, **keys), "here").backend
    assert backend.encode("the").tokens == expected
    assert backend.encode("the", add_special_tokens=False).tokens == ["▁the"]


def test_token_types(llama_cpp_ids: dict[str, Any]) -> None:
    """Control tokens are special (left out of decoded text), user-defined ones are text that is never cut."""
    backend = build_tokenizer(sentencepiece(llama_cpp_ids), "here").backend
    assert backend.encode("<|user|><|end|>", add_special_tokens=False).tokens == ["<|user|>", "<|end|>"]
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    assert added == {"<s>": True, "</s>": True, "<|user|>": False, "<|end|>": True}


def test_llama3_begins_with_bos_and_takes_whole_words_first(smollm2_metadata: dict[str, Any]) -> None:
    keys = {**smollm2_metadata, "tokenizer.ggml.pre": "llama-bpe"}
    del keys["tokenizer.ggml.add_bos_token"]
    tokenizer = build_tokenizer(keys, "here")
    assert tokenizer.config["add_bos_token"] and tokenizer.backend.encode("Hello").ids == [1, 19556]
    keys["tokenizer.ggml.merges"] = []
    assert build_tokenizer(keys, "here").backend.encode("Hello").ids == [1, 19556]


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"pre": "nonesuch"}, UnsupportedModelError, "tokenizer.ggml.pre='nonesuch'.*smollm"),
    ({"model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model='bert'"),
    ({"model": None}, UnsupportedModelError, "tokenizer.ggml.model='none'"),
    ({"tokens": None}, CheckpointError, "file: metadata key tokenizer.ggml.tokens is missing"),
    ({"merges": None}, CheckpointError, "file: metadata key tokenizer.ggml.merges is missing"),
    ({"merges": ["a nonesuch"]}, CheckpointError, "file: the vocabulary's merges are broken"),
    ({"merges": ["a"]}, CheckpointError, "file: the vocabulary's merges are broken"),
    ({"token_type": np.ones(3, np.int32)}, CheckpointError, "2 tokens, but 3 token types"),
    ({"eos_token_id": 9}, CheckpointError, "tokenizer.ggml.eos_token_id is 9, the vocabulary has 2 tokens"),
])
def test_what_cannot_be_rebuilt_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [], **change}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}
    with pytest.raises(error, match=message):
        build_tokenizer(metadata, "file")


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    model, hf = tiny_checkpoint("Llama")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    write_gguf(tmp_path / "model.gguf", weights, {**model.config.to_dict(), **hf})
    assert not open_source(tmp_path).has_tokenizer
