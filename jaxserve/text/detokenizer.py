"""Token ids to text, token by token, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from jaxserve.text.tokenizer import PieceKind, PieceTable, Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text of one output as it grows.

    The deltas joined are the text that one decode of prompt and output has after the text of the prompt. For
    byte-level BPE that is `tokenizer.decode(output_ids)`. Where decoding treats the very start of a text specially
    (SentencePiece drops a leading space), the output is a continuation, as in vLLM: its leading space is kept,
    unless the prompt has no text. Bytes are not joined across the border of prompt and output.

    Withheld until it is certain: an incomplete UTF-8 sequence and, where the vocabulary has byte tokens
    (`<0x0A>`), a run of these, because one broken byte turns all of its run into U+FFFD.

    Args:
      tokenizer: gives the pieces.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: keep the space that some decoders put between two added tokens in a row.
      prompt_token_ids: what the output continues; its text is never part of the deltas.
    """

    __slots__ = ("_backlog", "_joiner", "_open", "_pieces", "_table")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ):
        self._table = table = tokenizer.pieces(skip_special_tokens)
        self._joiner: _Joiner
        if table.kind is PieceKind.BYTE_LEVEL:
            self._joiner = _Utf8Joiner(table)
        elif table.kind is PieceKind.BYTE_FALLBACK:
            self._joiner = _ByteRunJoiner(table, prompt_token_ids)
        else:
            self._joiner = _WindowJoiner(tokenizer, table, prompt_token_ids, spaces_between_special_tokens)
        self._open = self._joiner.open
        self._pieces: list[str] = []
        self._backlog: list[int] = []

    def append(self, token_id: int) -> str:
        """Adds one token and returns the text that became certain: "" if none did."""
        if self._backlog:
            self._catch_up()
        text = self._table[token_id]
        if text is None or self._open:
            text = self._joiner.push(token_id, text)
            self._open = self._joiner.open
        self._pieces.append(text)
        return text

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds tokens whose text is not needed yet; decoded together once `text`, `append` or `finish` needs it."""
        self._backlog.extend(token_ids)

    def finish(self) -> str:
        """Says that no token follows; returns the withheld text. Broken bytes come out as U+FFFD."""
        self._catch_up()
        text = self._joiner.flush()
        self._open = self._joiner.open
        self._pieces.append(text)
        return text

    @property
    def text(self) -> str:
        """All deltas so far, joined."""
        self._catch_up()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def pending(self) -> str:
        """What `finish` would return now, if all of it is whole characters, else ""; for looking ahead for stops."""
        if not self._open:
            return ""
        return self._joiner.pending()

    def _catch_up(self) -> None:
        backlog, self._backlog = self._backlog, []
        if not backlog:
            return
        table = self._table
        pieces = [table[token_id] for token_id in backlog]
        if self._open or None in pieces:
            for token_id in backlog:
                self.append(token_id)
        else:
            self._pieces.append("".join(pieces))  # type: ignore[arg-type]


class _Joiner(Protocol):
    """Handles the tokens whose text depends on their neighbours. While `open`, it must see every token."""

    open: bool

    def push(self, token_id: int, text: str | None) -> str: ...
    def flush(self) -> str: ...
    def pending(self) -> str: ...


class _Utf8Joiner:
    """Byte-level BPE: tokens are bytes. `open`: the bytes so far end inside a character."""

    def __init__(self, table: PieceTable):
        self._table = table
        self._bytes = b""
        self.open = False

    def push(self, token_id: int, text: str | None) -> str:
        data = self._bytes + self._table.piece_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        self.open = used < len(data)
        return text

    def flush(self) -> str:
        text, self._bytes, self.open = self._bytes.decode("utf-8", "replace"), b"", False
        return text

    def pending(self) -> str:
        return ""


class _ByteRunJoiner:
    """SentencePiece pieces: texts and byte tokens. `open`: in a run of byte tokens, or nothing was written yet."""

    def __init__(self, table: PieceTable, prompt_token_ids: Sequence[int]):
        self._table = table
        self._run = b""
        has_context = any(table[token_id] != "" for token_id in reversed(prompt_token_ids))
        self._strip = table.strips_leading_space and not has_context
        self.open = self._strip

    def push(self, token_id: int, text: str | None) -> str:
        if text is None:
            self._run += self._table.piece_bytes(token_id)
            self.open = True
            return ""
        if not text:  # skipped or unknown: as if it were not there
            return ""
        return self.flush() + self._stripped(text)

    def flush(self) -> str:
        run, self._run = self._run, b""
        text = self._stripped(_decode_run(run))
        self.open = self._strip
        return text

    def pending(self) -> str:
        text = _decode_run(self._run)
        if text.startswith(REPLACEMENT):
            return ""
        return text[1:] if self._strip and text.startswith(" ") else text

    def _stripped(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = self.open = False
        return text.removeprefix(" ")


def _decode_run(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError:
        return REPLACEMENT * len(run)  # as the tokenizers library does


class _WindowJoiner:
    """Any other tokenizer: decodes a short window of tokens twice, without and with the new one. Always `open`.

    The window begins where the text was certain and is not empty, so that what a decoder does at the start of a
    text falls into the part that both have in common.
    """

    def __init__(self, tokenizer: Tokenizer, table: PieceTable, prompt_token_ids: Sequence[int], spaces: bool):
        self.open = True
        self._table = table
        self._decode = tokenizer.backend.decode
        self._added = frozenset() if spaces else tokenizer.added_ids
        self._after_added = False
        self._ids = self._context(prompt_token_ids)
        self._num_read = len(self._ids)
        self._known = self._text(self._ids)

    def push(self, token_id: int, text: str | None) -> str:
        if text == "":
            return ""
        self._ids.append(token_id)
        text = self._text(self._ids)
        if self._is_open(text, token_id):
            return ""
        after_added, self._after_added = self._after_added, token_id in self._added
        delta = text[len(self._known):]
        if after_added and self._after_added:
            delta = self._table.content(token_id)
        self._advance(text)
        return delta

    def flush(self) -> str:
        text = self._text(self._ids)
        delta = text[len(self._known):]
        self._advance(text)
        return delta

    def pending(self) -> str:
        if self._num_read == len(self._ids):
            return ""
        text = self._text(self._ids)[len(self._known):]
        return "" if REPLACEMENT in text else text

    def _text(self, token_ids: list[int]) -> str:
        return self._decode(token_ids, skip_special_tokens=False)  # skipped ones never get here

    def _is_open(self, text: str, token_id: int) -> bool:
        if self._table.has_byte_tokens:
            return self._table.is_byte_token(token_id)
        return text.endswith(REPLACEMENT)

    def _advance(self, text: str) -> None:
        """All of `text` is released: the window may begin at what the last push added, if that has text."""
        tail = self._ids[self._num_read:]
        known = self._text(tail)
        if known and not known.startswith(REPLACEMENT):
            self._ids, self._known = tail, known
        else:
            self._known = text
        self._num_read = len(self._ids)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that has certain text."""
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._table[token_id] != "":
                context.insert(0, token_id)
                text = self._text(context)
                if len(context) >= 4 and text and not text.startswith(REPLACEMENT):
                    break
        return context
