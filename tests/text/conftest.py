"""Tokenizers built on the spot, of the kinds that served models have."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxserve.text import Tokenizer

CORPUS = [
    "Hello world, this is a small corpus of text: words, numbers 1 2 3 10 2024 and (punctuation)!",
    "DEF G HI J K DEFGHIJ. Paris is the capital of France; the capital is Paris.\n\nNew paragraph\n1. one\n2. two",
    "Ünïcödé tëxt, naïve café, 日本語のテキスト, Привет мир, 😀 😃 emoji 👩‍💻",
    "def f(x):\n    return x + 1  # it's code, isn't it? don't they'll",
] * 3

BYTE_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def byte_level_backend(add_bos: bool = False) -> Backend:
    """As Llama 3 and Qwen have it; ids of special tokens come last."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(BYTE_WORDS), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"])
    backend.add_tokens(["<tool>", "né"])
    if add_bos:
        ids = [("<|bos|>", backend.token_to_id("<|bos|>"))]
        backend.post_processor = processors.TemplateProcessing(single=["<|bos|>", "$A"], special_tokens=ids)
    return backend


def sentencepiece_backend(style: str = "llama") -> Backend:
    """BPE over pieces with ▁ for space and one token per byte; `style`: as Llama 2 (prefix space) or as Gemma."""
    special = ["<unk>", "<s>", "</s>"]
    trained = Backend(models.BPE(unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.train_from_iterator(["".join(c for c in text if ord(c) < 0x100) for text in CORPUS], trainer)
    return _with_byte_tokens(trained, special, style)


def _with_byte_tokens(trained: Backend, special: list[str], style: str) -> Backend:
    model = json.loads(trained.to_str())["model"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    tokens.remove("\n")  # as in Llama 2: newline is a byte token
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    merges = [(a, b) for a, b in merges if a in tokens and b in tokens and a + b in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return backend


def word_backend() -> Backend:
    """No decoder: words joined by spaces, so that a token's text depends on its neighbours."""
    words = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *sorted(set(" ".join(CORPUS).split()))])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend(), {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer(sentencepiece_backend(), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def gemma_like() -> Tokenizer:
    return Tokenizer(sentencepiece_backend("gemma"), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture(scope="session")
def windowed() -> Tokenizer:
    """Decodes exactly as `sentencepiece`, but by a decoder that has no table of texts."""
    backend = sentencepiece_backend()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend, {})


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return Tokenizer(word_backend(), {})


@pytest.fixture(scope="session")
def make_byte_level() -> Callable[..., Backend]:
    """Makes a fresh copy: a Tokenizer changes its backend."""
    plain, with_bos = byte_level_backend().to_str(), byte_level_backend(add_bos=True).to_str()
    return lambda add_bos=False: Backend.from_str(with_bos if add_bos else plain)


@pytest.fixture(scope="session")
def make_sentencepiece() -> Callable[..., Backend]:
    texts = {style: sentencepiece_backend(style).to_str() for style in ("llama", "gemma")}
    return lambda style="llama": Backend.from_str(texts[style])
