"""Ids equal those of transformers' AutoTokenizer for the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoTokenizer

from jaxserve.errors import CheckpointError, ModelNotFoundError
from jaxserve.text import Tokenizer

TEXTS = ["日本語 😀👩‍💻 é e\u0301 ▁x", "क्षि थ्य", "", " ", "Hello world", " Hello  world ", "a\n\n b\n",
         "Paris 12345 isn't it's DON'T", "<|im_start|>user\nhi<|im_end|>\n", "<s>Hello</s> there <s> x", "a<tool>b né",
         "<0x0A>", "\x00\t\ufffd"]
BOS = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
ADDED = {"content": "<extra>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False,
         "special": True}


def write(folder: Path, backend: Backend, config: dict[str, Any], model_type: str | None = "llama",
          special_map: dict[str, Any] | None = None) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if special_map:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    return folder


def assert_equals_transformers(folder: Path) -> Tokenizer:
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.special_tokens == theirs.special_tokens_map
    for name in ("bos", "eos", "pad"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token")
        assert getattr(ours, f"{name}_token_id") == getattr(theirs, f"{name}_token_id")
    return ours


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
BYTE_LEVEL_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({**FAST, **BOS}, "llama"),
    ({**FAST, **BOS, "add_bos_token": True, "add_eos_token": True}, "llama"),
    ({**FAST, **BOS, "pad_token": "<pad>"}, "mistral"),
    ({**FAST, "additional_special_tokens": ["<tool>", "<new>"], "image_token": "<img>"}, "llama"),
    ({**FAST, "added_tokens_decoder": {"425": ADDED}, "eos_token": "<extra>"}, "llama"),
    ({**FAST, "split_special_tokens": True}, "llama"),
    ({"tokenizer_class": "LlamaTokenizerFast", **BOS}, "llama"),
    ({"tokenizer_class": "LlamaTokenizer", **BOS}, "mistral"),
    ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None}, "qwen2"),
    ({"tokenizer_class": "Qwen2TokenizerFast", "add_prefix_space": True}, "qwen3"),
    ({**FAST, "eos_token": "<|im_end|>"}, "qwen2"),
    ({**FAST, "eos_token": "<|im_end|>"}, "qwen3"),
    ({}, "qwen3"),
    ({"tokenizer_class": "Qwen2Tokenizer"}, "qwen3_5"),
    ({"tokenizer_class": "GPT2Tokenizer"}, "granite"),
]


@pytest.mark.parametrize(("config", "model_type"), BYTE_LEVEL_CASES)
@pytest.mark.parametrize("add_bos", [False, True])
def test_byte_level(tmp_path: Path, make_byte_level: Callable[..., Backend], config: dict[str, Any],
                    model_type: str | None, add_bos: bool) -> None:
    assert_equals_transformers(write(tmp_path, make_byte_level(add_bos), config, model_type))


SENTENCEPIECE_CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, None),
    ("llama", FAST, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizer"}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": False}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizerFast", "legacy": False, "add_eos_token": True}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizerFast", "add_prefix_space": False}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>", "sp_model_kwargs": {}}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizer", "bos_token": {"__type": "AddedToken", **ADDED}}, "llama"),
    ("llama", {"tokenizer_class": "LlamaTokenizer"}, "mistral"),
    ("llama", {"tokenizer_class": "LlamaTokenizer"}, "phi3"),
    ("gemma", {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}, "gemma2"),
    ("gemma", {}, "gemma3_text"),
]


@pytest.mark.parametrize(("style", "config", "model_type"), SENTENCEPIECE_CASES)
def test_sentencepiece(tmp_path: Path, make_sentencepiece: Callable[..., Backend], style: str, config: dict[str, Any],
                       model_type: str | None) -> None:
    assert_equals_transformers(write(tmp_path, make_sentencepiece(style), config, model_type))


def test_special_tokens_map(tmp_path: Path, make_byte_level: Callable[..., Backend]) -> None:
    eos = {key: value for key, value in ADDED.items() if key != "special"} | {"content": "<|im_end|>"}
    special_map = {"eos_token": eos, "bos_token": "<|bos|>", "pad_token": "<pad>"}
    ours = assert_equals_transformers(write(tmp_path, make_byte_level(), FAST, special_map=special_map))
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|bos|>", "<|im_end|>", "<pad>")


def test_template_files(tmp_path: Path, make_byte_level: Callable[..., Backend]) -> None:
    folder = write(tmp_path, make_byte_level(), {**FAST, "chat_template": "config"})
    assert Tokenizer.from_folder(folder).chat.templates == {"default": "config"}
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat.templates == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_folder(folder).chat.templates == AutoTokenizer.from_pretrained(folder).chat_template


def test_save_and_load(tmp_path: Path, make_sentencepiece: Callable[..., Backend]) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "pad_token": "<pad>", "legacy": True}
    (tmp_path / "a").mkdir()
    first = Tokenizer.from_folder(write(tmp_path / "a", make_sentencepiece(), config))
    first = Tokenizer(first.backend, first.config, {"default": "x", "tool_use": "y"})
    first.save(tmp_path / "b")
    second = Tokenizer.from_folder(tmp_path / "b")
    assert [second.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    assert (second.special_tokens, second.chat.templates) == (first.special_tokens, first.chat.templates)
    assert second.vocab_size == first.vocab_size


def test_bos_and_eos_of_a_backend_without_post_processor(make_byte_level: Callable[..., Backend]) -> None:
    backend = make_byte_level()
    assert Tokenizer(make_byte_level(), BOS).encode("") == []  # H09: the engine refuses an empty prompt
    ids = Tokenizer(backend, {**BOS, "add_bos_token": True, "add_eos_token": True}).encode("a")
    assert ids == [backend.token_to_id("<|bos|>"), backend.token_to_id("a"), backend.token_to_id("<|im_end|>")]


def test_truncation_and_padding_in_the_file_are_off(make_byte_level: Callable[..., Backend]) -> None:
    backend = make_byte_level()
    backend.enable_truncation(2)
    backend.enable_padding()
    tokenizer = Tokenizer(backend, {})
    assert len(tokenizer.encode("Hello world 日本")) > 2
    assert len(tokenizer.encode_batch(["a", "a b c"])[0]) == 1


def test_token_text(byte_level: Tokenizer, sentencepiece: Tokenizer, words: Tokenizer) -> None:
    for i in range(byte_level.vocab_size):
        assert byte_level.token_text(i) == byte_level.decode([i], skip_special_tokens=False)
    assert sentencepiece.token_text(sentencepiece.encode("the", False)[0])[0] == " "
    assert [sentencepiece.token_text(3 + byte) for byte in (0x0A, 0x41, 0xE2)] == ["\n", "A", "\ufffd"]
    assert words.token_text(words.encode("world,")[0]) == "world,"


def test_h03_token_texts_join_to_the_text(sentencepiece: Tokenizer, byte_level: Tokenizer, words: Tokenizer) -> None:
    for tokenizer in (sentencepiece, byte_level, words):
        for text in ("\n1. the 2 capital 345\n", "日本 😀", ""):
            ids = tokenizer.encode(text)
            texts = tokenizer.token_texts(ids)
            assert len(texts) == len(ids)
            assert "".join(texts) == tokenizer.decode(ids)
    assert "".join(sentencepiece.token_texts(sentencepiece.encode("\n1. the 2"))) == "\n1. the 2"


def test_whole_alphabet_of_bytes(make_byte_level: Callable[..., Backend]) -> None:
    table = Tokenizer(make_byte_level(), {}).pieces(True)
    assert sorted(table.piece_bytes(i) for i in range(256)) == [bytes([byte]) for byte in range(256)]


def test_missing_and_corrupt_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_without_tokenizer_json_transformers_reads_it(tmp_path: Path, make_byte_level: Callable[..., Backend]) -> None:
    backend = make_byte_level()
    assert isinstance(backend.model, models.BPE)
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_a_folder_with_tokenizer_json_imports_neither_jax_nor_transformers(
    tmp_path: Path, make_byte_level: Callable[..., Backend]
) -> None:
    write(tmp_path, make_byte_level(), {**FAST, "chat_template": "x"})
    program = ("import sys, types; root = types.ModuleType('jaxserve'); root.__path__ = ['jaxserve']\n"
               "sys.modules['jaxserve'] = root  # the package itself may import the engine\n"
               "from jaxserve.text import Tokenizer\n"
               f"tokenizer = Tokenizer.from_folder({str(tmp_path)!r})\n"
               "assert tokenizer.chat.render([{'role': 'user', 'content': 'a'}]) == 'x'\n"
               "print([name for name in ('jax', 'transformers', 'torch') if name in sys.modules])")
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
