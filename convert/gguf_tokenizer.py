"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` package so that its ids equal llama.cpp's."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from convert.source import TokenizerData
from jaxserve.errors import CheckpointError, UnsupportedModelError

_CONTROL, _USER_DEFINED = 3, 4

# Splitting by regex as each model family was trained. Text is cut by every expression in turn; what an expression does
# not match stays together as a piece.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
             r"|\s+(?!\S)|\s+")
_LLAMA3 = (_CASELESS % r"\p{N}{1,3}",)
_QWEN2 = (_CASELESS % r"\p{N}",)
_DIGITS = (r"\p{N}", _GPT2)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,), "phi-2": (_GPT2,), "olmo": (_GPT2,),
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS, "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3")  # a word of the vocabulary is never taken apart
_BOS_BY_DEFAULT = _WHOLE_WORDS_FIRST


def build_tokenizer(metadata: dict[str, Any], where: str) -> TokenizerData:
    """Rebuilds the tokenizer from tokenizer.ggml.* metadata.

    Raises:
      CheckpointError: a needed key is missing or the vocabulary contradicts itself.
      UnsupportedModelError: a tokenizer model or pre-tokenizer that is not known.
    """
    keys = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model = keys.get("model", "none")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModelError("tokenizer.ggml.model", model, f"gpt2 or llama (in {where})")
    if "tokens" not in keys:
        raise CheckpointError(f"{where}: metadata key tokenizer.ggml.tokens is missing")
    tokens: list[str] = keys["tokens"]
    types = keys["token_type"].tolist() if "token_type" in keys else [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{where}: {len(tokens)} tokens, but {len(types)} token types")
    backend = _byte_level(tokens, keys, where) if model == "gpt2" else _sentencepiece(tokens, keys, where)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens([AddedToken(token, special=special, normalized=False)
                            for token, kind in zip(tokens, types, strict=True) if kind == wanted])
    config = _settings(tokens, keys, metadata, where)
    _add_bos_and_eos(backend, config, keys)
    return TokenizerData(backend, config)


def _byte_level(tokens: list[str], keys: dict[str, Any], where: str) -> Tokenizer:
    if "merges" not in keys:
        raise CheckpointError(f"{where}: metadata key tokenizer.ggml.merges is missing")
    pre = keys.get("pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedModelError("tokenizer.ggml.pre", pre, f"one of {', '.join(_SPLITS)} (in {where})")
    merges = [_pair(merge) for merge in keys["merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(f"{where}: the vocabulary's merges are broken: {error}") from error
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*(_split(pattern) for pattern in _SPLITS[pre]), to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    """The library has the commonest pattern as a part of its own, which is faster."""
    if pattern == r"\p{N}":
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _pair(merge: str) -> tuple[str, str]:
    """A merge's two halves; the first may be or begin with a space in some old files."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _sentencepiece(tokens: list[str], keys: dict[str, Any], where: str) -> Tokenizer:
    """SentencePiece BPE: the pair whose union has the best score merges first."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if "merges" in keys:
        merges = [_pair(merge) for merge in keys["merges"]]
    elif "scores" in keys:
        merges = merges_from_scores(vocab, keys["scores"].tolist())
    else:
        raise CheckpointError(f"{where}: metadata has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
    unknown = tokens[int(keys.get("unknown_token_id", 0))]
    prefix = bool(keys.get("add_space_prefix", True))
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All ways to put a token together from two others, best score of the union first."""
    ranked = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], token_id, vocab[left], left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]


def _settings(tokens: list[str], keys: dict[str, Any], metadata: dict[str, Any], where: str) -> dict[str, Any]:
    """What tokenizer_config.json would say."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = keys.get(f"{key}_token_id")
        if token_id is not None:
            if token_id >= len(tokens):
                raise CheckpointError(f"{where}: tokenizer.ggml.{key}_token_id is {token_id}, "
                                      f"the vocabulary has {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[token_id]
    spm = keys["model"] == "llama"
    config["add_bos_token"] = bool(keys.get("add_bos_token", spm or keys.get("pre") in _BOS_BY_DEFAULT))
    config["add_eos_token"] = bool(keys.get("add_eos_token", False))
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _add_bos_and_eos(backend: Tokenizer, config: dict[str, Any], keys: dict[str, Any]) -> None:
    """Makes encode(add_special_tokens=True) add what the model was trained with."""
    begin = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    end = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if begin or end:
        ids = {config[f"{kind}_token"]: int(keys[f"{kind}_token_id"])
               for kind in ("bos", "eos") if f"{kind}_token" in config}
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], pair=[*begin, "$A", *end, *begin, "$B", *end],
            special_tokens=[(token, ids[token]) for token in dict.fromkeys(begin + end)])
