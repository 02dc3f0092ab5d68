"""Joined deltas are one decode of all ids, whatever the ids."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import IncrementalDetokenizer, Tokenizer
from jaxserve.text.pieces import PieceKind

KINDS = {"byte_level": PieceKind.BYTE_LEVEL, "sentencepiece": PieceKind.BYTE_FALLBACK,
         "gemma_like": PieceKind.BYTE_FALLBACK, "windowed": PieceKind.OTHER, "words": PieceKind.OTHER}
REPLACEMENT = "\ufffd"
EMOJI = "ok 🦜🌍!"


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    assert found.pieces(True).kind is KINDS[request.param]
    return found


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    deltas = [detokenizer.append(token_id) for token_id in ids] + [detokenizer.finish()]
    assert detokenizer.text == "".join(deltas)
    lazy = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    lazy.extend(ids)
    assert lazy.text + lazy.finish() == detokenizer.text
    return deltas


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_ids(all_tokenizers: list[Tokenizer], data: st.DataObject, skip: bool) -> None:
    for tokenizer in all_tokenizers:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
        assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bytes_of_broken_utf8(all_tokenizers: list[Tokenizer], data: st.DataObject) -> None:
    """Denser in half characters than ids at random."""
    raw = data.draw(st.lists(st.sampled_from([b"a", b" ", "é".encode(), "😀".encode(), b"\xf0\x9f", b"\xe2", b"\x98",
                                              b"\x80", b"\xff", b"\xed\xa0\x80"]), max_size=12))
    for tokenizer in all_tokenizers:
        byte_ids = bytes_to_ids(tokenizer, b"".join(raw))
        assert "".join(stream(tokenizer, byte_ids)) == tokenizer.decode(byte_ids)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_continues_the_prompt(all_tokenizers: list[Tokenizer], data: st.DataObject) -> None:
    text = st.text(st.sampled_from("ab é日😀\n1."), max_size=12)
    for tokenizer in all_tokenizers:
        prompt, output = tokenizer.encode(data.draw(text)), tokenizer.encode(data.draw(text), False)
        prompt_text = tokenizer.decode(prompt)
        deltas = stream(tokenizer, output, prompt_token_ids=prompt)
        if tokenizer.pieces(True).kind is PieceKind.BYTE_LEVEL or prompt_text:
            assert prompt_text + "".join(deltas) == tokenizer.decode(prompt + output)


def bytes_to_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    table = tokenizer.pieces(True)
    if table.has_byte_tokens:
        vocab = tokenizer.backend.get_vocab()
        return [vocab["a" if byte == ord("a") else f"<0x{byte:02X}>"] for byte in data]
    if table.kind is PieceKind.BYTE_LEVEL:
        by_bytes = {table.piece_bytes(i): i for i in range(256)}
        return [by_bytes[bytes([byte])] for byte in data]
    return [3 + byte % 20 for byte in data]


def test_split_emoji_never_shows_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    deltas = stream(tokenizer, ids)
    assert not any(REPLACEMENT in delta for delta in deltas)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert len(ids) > len(EMOJI) or tokenizer.pieces(True).kind is PieceKind.OTHER  # split, that is


def test_h02_broken_bytes_then_ascii_then_split_emoji(byte_level: Tokenizer, windowed: Tokenizer,
                                                      sentencepiece: Tokenizer) -> None:
    for tokenizer, broken in ((byte_level, REPLACEMENT), (windowed, REPLACEMENT * 2), (sentencepiece, REPLACEMENT * 2)):
        ids = bytes_to_ids(tokenizer, b"\xe2\x82" + "aa😀a".encode())
        deltas = stream(tokenizer, ids)
        assert "".join(deltas) == tokenizer.decode(ids) == broken + "aa😀a"
        assert all(REPLACEMENT not in delta for delta in deltas[4:])


def test_incomplete_end_comes_out_with_finish(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.append(i) for i in bytes_to_ids(byte_level, b"a\xf0\x9f")] == ["a", "", ""]
    assert detokenizer.pending == ""
    assert detokenizer.finish() == REPLACEMENT
    assert detokenizer.finish() == ""
    assert detokenizer.text == "a" + REPLACEMENT


def test_byte_run_is_pending_while_whole(sentencepiece: Tokenizer, windowed: Tokenizer) -> None:
    for tokenizer in (sentencepiece, windowed):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=tokenizer.encode("a"))
        seen = []
        for token_id in bytes_to_ids(tokenizer, "\né".encode()):
            assert detokenizer.append(token_id) == ""
            seen.append(detokenizer.pending)
        assert seen == ["\n", "", "\né"]
        assert detokenizer.append(bytes_to_ids(tokenizer, b"a")[0]) == "\néa"
        assert detokenizer.pending == ""


def test_special_tokens(byte_level: Tokenizer, words: Tokenizer) -> None:
    end = byte_level.token_id("<|im_end|>")
    assert end is not None
    ids = [*byte_level.encode("Hello"), end, *byte_level.encode(" world")]
    assert "".join(stream(byte_level, ids)) == "Hello world"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)) == "Hello<|im_end|> world"
    ids = [1, *words.encode("Hello world,"), 2, 2]
    assert "".join(stream(words, ids)) == "Hello world,"
    kept = {"skip_special_tokens": False}
    assert "".join(stream(words, ids, **kept)) == "<s> Hello world, </s> </s>"
    assert "".join(stream(words, ids, **kept, spaces_between_special_tokens=False)) == "<s> Hello world, </s></s>"


def test_unknown_ids_never_raise(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, [tokenizer.vocab_size, 2**31, -1])) == ""


def test_append_after_extend(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello 😀 world,", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.extend(ids[:3])
    for token_id in ids[3:]:
        detokenizer.append(token_id)
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(ids)


def test_ascii_is_fast(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("Hello world, this is a small corpus of text " * 200)
    best = float("inf")
    for _ in range(5):
        detokenizer = IncrementalDetokenizer(byte_level)
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.append(token_id)
        best = min(best, time.perf_counter() - start)
    assert best / len(ids) < 1e-6  # seconds a token; 0.1 to 0.2 us is usual


@pytest.fixture(scope="session")
def all_tokenizers(byte_level: Tokenizer, sentencepiece: Tokenizer, gemma_like: Tokenizer, windowed: Tokenizer,
                   words: Tokenizer) -> list[Tokenizer]:
    return [byte_level, sentencepiece, gemma_like, windowed, words]
