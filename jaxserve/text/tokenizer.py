"""Text to token ids and back, and what each single token looks like.

Reads a Hugging Face folder without importing transformers (2.5 s), with the ids that its AutoTokenizer gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from jaxserve.text.chat import ChatTemplate
from jaxserve.text.pieces import PieceKind, PieceTable
from jaxserve.text.pretrained import read_tokenizer_folder

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` together with its tokenizer_config and chat template.

    Args:
      backend: tokenises; changed in place (added tokens, no padding, no truncation). If it has no post-processor,
        one is made from the config's `add_bos_token` and `add_eos_token`.
      config: contents of a tokenizer_config.json. Read here: names of special tokens, `added_tokens_decoder`,
        `extra_special_tokens`, `split_special_tokens` and, unless given, `chat_template`.
      chat_template: Jinja text, or several by name.

    Attributes:
      special_tokens: name (such as "eos_token") -> text; what a chat template sees.
    """

    def __init__(
        self,
        backend: Backend,
        config: dict[str, Any] | None = None,
        chat_template: str | dict[str, str] | None = None,
    ):
        self.backend = backend
        self.config = dict(config or {})
        self.special_tokens = _named_tokens(self.config)
        self.chat = ChatTemplate(chat_template or self.config.get("chat_template"), self.special_tokens)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(self.config.get("split_special_tokens", False))
        backend.add_tokens(_tokens_to_add(backend, self.config, self.special_tokens))
        if backend.post_processor is None:
            backend.post_processor = self._bos_eos_processor()
        self._pieces: dict[bool, PieceTable] = {}
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Loads tokenizer.json, or, where there is none, whatever transformers can make of the folder.

        Raises:
          ModelNotFoundError: no tokenizer is there.
          CheckpointError: a file is corrupt.
        """
        folder = read_tokenizer_folder(Path(path))
        return cls(folder.backend, folder.config, folder.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with BOS and the like where the tokenizer adds them. May be empty."""
        return self.encode_batch([text], add_special_tokens)[0]  # the backend lets other threads run for batches only

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel."""
        return [e.ids for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        """Token ids of a conversation; options are those of `ChatTemplate.render`.

        Special tokens are only those that the template writes (H12 of the fault list: never a second BOS).
        """
        return self.encode(self.chat.render(messages, **options), add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the vocabulary lacks are left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, special ones included, a leading space kept; broken bytes as U+FFFD."""
        text = self._token_texts.get(token_id)  # asked for 20 alternatives of every token with logprobs
        if text is None:
            text = self._token_texts[token_id] = self._text_alone(token_id)
        return text

    def _text_alone(self, token_id: int) -> str:
        table = self.pieces(skip_special_tokens=False)
        if table.kind is PieceKind.OTHER:
            return self.decode([token_id], skip_special_tokens=False)
        text = table[token_id]
        return table.piece_bytes(token_id).decode("utf-8", "replace") if text is None else text

    def token_texts(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
        """Text that each token adds; joined they are the decoded text. A split character belongs to its last token."""
        from jaxserve.text.detokenizer import IncrementalDetokenizer

        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        texts = [detokenizer.append(token_id) for token_id in token_ids]
        if texts:
            texts[-1] += detokenizer.finish()
        return texts

    def pieces(self, skip_special_tokens: bool) -> PieceTable:
        """The table id -> text of a token, filled as tokens are met."""
        if skip_special_tokens not in self._pieces:
            skipped = self.all_special_ids if skip_special_tokens else frozenset()
            self._pieces[skip_special_tokens] = PieceTable(self.backend, skipped)
        return self._pieces[skip_special_tokens]

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat template(s)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config = {key: value for key, value in self.config.items() if key != "chat_template"}
        for name, template in self.chat.templates.items():
            file = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
            target = folder / file
            target.parent.mkdir(exist_ok=True)
            target.write_text(template, encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's logits may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of a text that one token can stand for."""
        # Unicode's composition makes one character of up to four.
        shrinks = 1 if self.backend.normalizer is None else 4
        return shrinks * max(map(len, self.backend.get_vocab()), default=1)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """The ids that decoding with `skip_special_tokens` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Ids of all tokens added on top of the model's vocabulary, special or not."""
        return frozenset(self.backend.get_added_tokens_decoder())

    def token_id(self, token: str | None) -> int | None:
        """Id of a token given by its text in the vocabulary; None if there is none."""
        return None if token is None else self.backend.token_to_id(token)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @cached_property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.bos_token)

    @cached_property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.eos_token)

    @cached_property
    def pad_token_id(self) -> int | None:
        return self.token_id(self.pad_token)

    def _bos_eos_processor(self) -> processors.TemplateProcessing:
        bos = self.bos_token if self.config.get("add_bos_token") else None
        eos = self.eos_token if self.config.get("add_eos_token") else None
        ids = [(token, self.token_id(token)) for token in (bos, eos) if token is not None]
        single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        return processors.TemplateProcessing(single=single, special_tokens=ids)


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Standard names first, then a model's own (such as "image_token")."""
    extra = config.get("extra_special_tokens")
    own = [key for key in config if key.endswith("_token") and key not in _NAMED_TOKENS]
    named = {key: config[key] for key in (*_NAMED_TOKENS, *own) if isinstance(config.get(key), (str, dict))}
    return {key: _content(token) for key, token in (named | (extra if isinstance(extra, dict) else {})).items()}


def _tokens_to_add(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> list[AddedToken]:
    """Tokens that the config says are added but tokenizer.json may lack, in the order in which they get ids."""
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    tokens = {entry["content"]: _added_token(entry) for _, entry in listed}
    for content in tokens.keys() & set(named.values()):
        tokens[content].special = True
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | tokens.keys()
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = [config.get(name, content) for name, content in named.items()]
    for token in [*others, *(extra if isinstance(extra, list) else [])]:
        if _content(token) not in known:
            tokens[_content(token)] = _added_token(token)
    return list(tokens.values())


def _added_token(token: str | dict[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    return AddedToken(**{"special": True} | {key: value for key, value in token.items() if key != "__type"})
