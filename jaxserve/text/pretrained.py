"""Reads a tokenizer from a Hugging Face folder, with what transformers changes about it while loading."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, ModelNotFoundError


@dataclass(frozen=True)
class TokenizerFolder:
    """What a folder holds: a tokenizer, the contents of its tokenizer_config.json, and chat templates if any."""

    backend: Backend
    config: dict[str, Any]
    chat_template: Any


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """See `Tokenizer.from_folder`."""
    config = _read_json(folder / "tokenizer_config.json")
    template = _chat_template_files(folder) or config.get("chat_template")
    if not (folder / "tokenizer.json").is_file():
        return _from_transformers(folder, template)
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exceptions
        raise CheckpointError(f"{folder / 'tokenizer.json'}: {error}") from error
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    _apply_class(backend, config, _read_json(folder / "config.json"))
    # AutoTokenizer takes the file's post-processor as it is and ignores these two.
    config = {key: value for key, value in config.items() if key not in ("add_bos_token", "add_eos_token")}
    return TokenizerFolder(backend, config, template)


def _from_transformers(folder: Path, template: Any) -> TokenizerFolder:
    """For folders with only a SentencePiece or tiktoken model, or vocab.json and merges.txt."""
    not_found = ModelNotFoundError("tokenizer", str(folder), "a folder with a tokenizer.json, or a tokenizer that "
                                   "transformers can load and the tokenizers library can represent")
    if not folder.is_dir():
        raise not_found
    from transformers import AutoTokenizer  # slow to import, so only here

    try:
        loaded = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise not_found from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise not_found
    return TokenizerFolder(backend, dict(loaded.special_tokens_map), template or loaded.chat_template)


# transformers 5 rebuilds some tokenizers from vocabulary and merges alone and sets the rest itself. Which class it
# takes depends on tokenizer_config.json and on the model; the tables hold the classes of models served here.
_LLAMA, _QWEN2, _QWEN3_5, _GEMMA = "LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "GemmaTokenizer"
_CLASS_OF_MODEL = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), _GEMMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), _QWEN2),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5),
}
_FILE_AS_IT_IS = ("mistral", "mistral3", "ministral", "ministral3", "mixtral", "phi3", "granite", "granitemoe", "glm",
                  "glm4", "glm4_moe", "olmo2", "olmo3", "stablelm", "internlm2", "internlm3", "minicpm3", "nemotron")
_MODELS_OVERRULING_CONFIG = ("qwen2", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


def _apply_class(backend: Backend, config: dict[str, Any], model_config: dict[str, Any]) -> None:
    """Changes `backend` and fills in the default special tokens of `config`, as the class that loads them does."""
    if not isinstance(backend.model, models.BPE):
        return
    name = _class_name(backend, config, model_config)
    if name == _LLAMA:
        _as_llama(backend, config)
    elif name in (_QWEN2, _QWEN3_5):
        _as_qwen(backend, config, _QWEN2_WORDS if name == _QWEN2 else _QWEN3_5_WORDS)
    elif name == _GEMMA:
        _as_gemma(backend, config)


def _class_name(backend: Backend, config: dict[str, Any], model_config: dict[str, Any]) -> str | None:
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    declared = declared.removesuffix("Fast") if declared else None
    model = model_config.get("model_type", "")
    if declared is not None and model in _FILE_AS_IT_IS:
        return None
    if declared == _LLAMA and model not in _MODELS_OVERRULING_CONFIG and _is_byte_level(backend):
        return None
    if model in _MODELS_OVERRULING_CONFIG:
        return _CLASS_OF_MODEL[model]
    return declared or _CLASS_OF_MODEL.get(model)


def _is_byte_level(backend: Backend) -> bool:
    parts = (part for part in (backend.pre_tokenizer, backend.decoder) if part is not None)
    return any(b'"ByteLevel"' in part.__getstate__() for part in parts)


def _set_bpe(backend: Backend, *, byte_fallback: bool, fuse_unk: bool, unk_token: str | None = None) -> None:
    model = backend.model
    model.dropout, model.ignore_merges = None, False
    model.byte_fallback, model.fuse_unk, model.unk_token = byte_fallback, fuse_unk, unk_token


def _as_llama(backend: Backend, config: dict[str, Any]) -> None:
    config |= {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | config
    prefix = config.get("add_prefix_space") in (None, True)
    _set_bpe(backend, byte_fallback=True, fuse_unk=True)
    scheme = ("always" if config.get("legacy", False) else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))


def _as_gemma(backend: Backend, config: dict[str, Any]) -> None:
    config |= {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")} | config
    unk_token = config["unk_token"]
    unk_token = unk_token["content"] if isinstance(unk_token, dict) else unk_token
    _set_bpe(backend, byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_WORDS = _QWEN2_WORDS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"?[^\s\p{L}", r"?[^\s\p{L}\p{M}")


def _as_qwen(backend: Backend, config: dict[str, Any], words: str) -> None:
    config |= dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>") | config
    _set_bpe(backend, byte_fallback=False, fuse_unk=False)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(words), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False),
    ])
    backend.decoder = decoders.ByteLevel()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def _chat_template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
