"""The text of single tokens, by id."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceKind(enum.Enum):
    """How a tokenizer's decoder makes text: whether each token's part of it can be known on its own."""

    BYTE_LEVEL = enum.auto()
    """Every token is a string of bytes; the text is all of them read as UTF-8 (GPT-2, Llama 3, Qwen)."""
    BYTE_FALLBACK = enum.auto()
    """Tokens are texts, but for one token per byte (SentencePiece BPE: Llama 2, Mistral, Gemma)."""
    OTHER = enum.auto()
    """A token's text depends on its neighbours."""


class PieceTable(dict[int, str | None]):
    """Token id -> its part of the text; "" if left out or unknown; None where it depends on neighbours.

    Filled on first use: a whole vocabulary would cost 0.2 s at start. For kind OTHER every text is None or "".
    """

    def __init__(self, backend: Backend, skipped: frozenset[int]):
        super().__init__()
        decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self._id_to_token: Callable[[int], str | None] = backend.id_to_token
        self._skipped = skipped
        self._bytes: dict[int, bytes] = {}
        self.kind, self._replace, self.strips_leading_space = _classify(steps)
        self.has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = self._make(token_id)
        return text

    def _make(self, token_id: int) -> str | None:
        token = self.content(token_id)
        if not token or token_id in self._skipped:
            return ""
        if self.kind is PieceKind.BYTE_FALLBACK:
            return None if _BYTE_TOKEN.fullmatch(token) else token.replace(*self._replace)
        if self.kind is PieceKind.OTHER:
            return None
        try:
            return self.piece_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None

    def content(self, token_id: int) -> str:
        """The token as the vocabulary writes it; "" if unknown."""
        try:
            return self._id_to_token(token_id) or ""
        except OverflowError:  # negative
            return ""

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, of kinds BYTE_LEVEL and BYTE_FALLBACK; none if left out."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(token_id)
        return known

    def _make_bytes(self, token_id: int) -> bytes:
        token = self.content(token_id)
        if token_id in self._skipped:
            return b""
        if self.kind is PieceKind.BYTE_FALLBACK:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace(*self._replace).encode()
        try:
            return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
        except KeyError:  # an added token, written as it is
            return token.encode()

    def is_byte_token(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self.content(token_id)) is not None


def _classify(steps: list[dict[str, Any]]) -> tuple[PieceKind, tuple[str, str], bool]:
    """Returns the kind, what is replaced by what in each token, and whether a text's first space is dropped."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceKind.BYTE_LEVEL, ("", ""), False
    strip = steps[-1] if kinds[-1] == "Strip" else None
    body = kinds[:-1] if strip else kinds
    simple_strip = strip is None or (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)
    if body == ["Replace", "ByteFallback", "Fuse"] and simple_strip and "String" in steps[0]["pattern"]:
        return PieceKind.BYTE_FALLBACK, (steps[0]["pattern"]["String"], steps[0]["content"]), strip is not None
    return PieceKind.OTHER, ("", ""), False


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
