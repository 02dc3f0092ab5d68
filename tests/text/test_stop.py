"""What is released, joined, is the text up to the first complete stop, however it was cut into tokens."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.text import IncrementalDetokenizer, StopChecker, Tokenizer


def naive(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None]:
    """Looks at every end of the whole text, one by one."""
    text, floor = "".join(pieces), len("".join(pieces[:min_tokens]))
    for end in range(floor + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], checker: StopChecker) -> tuple[list[str], str | None]:
    released = []
    for piece in pieces:
        released.append(checker.feed(piece))
        if checker.matched is not None:
            break
    return [*released, checker.finish()], checker.matched


PIECES = st.lists(st.text("abc\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("abc\n", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=600, deadline=None)
@given(PIECES, STOPS, st.booleans(), st.integers(0, 4))
def test_equals_naive_search(pieces: list[str], stops: list[str], include: bool, min_tokens: int) -> None:
    released, matched = run(pieces, StopChecker(stops, include, min_tokens))
    assert ("".join(released), matched) == naive(pieces, stops, include, min_tokens)


@settings(max_examples=300, deadline=None)
@given(st.text("abc\n", max_size=20), STOPS, st.data())
def test_does_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, stop = run([text], StopChecker(stops))
    released, matched = run(pieces, StopChecker(stops))
    assert ("".join(released), matched) == ("".join(whole), stop)


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_releases_as_early_as_possible(pieces: list[str], stops: list[str]) -> None:
    checker, text, shown = StopChecker(stops), "", ""
    for piece in pieces:
        text, shown = text + piece, shown + checker.feed(piece)
        if checker.matched is not None:
            return
        held = text[len(shown):]
        assert shown + held == text
        possible = [k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
        assert len(held) == max(possible, default=0)


def test_h01_stop_of_several_tokens() -> None:
    for include, text in ((False, ""), (True, "DEFGHIJ")):
        checker = StopChecker(["DEFGHIJ"], include)
        released = [checker.feed(piece) for piece in ("DEF", "G", "HI", "J")]
        assert released == ["", "", "", text]
        assert checker.matched == "DEFGHIJ"
        assert checker.feed("K") == "" and checker.finish("K") == ""


def test_h01_stop_inside_a_token() -> None:
    checker = StopChecker(["Pari"])
    assert [checker.feed("In "), checker.feed("Paris")] == ["In ", ""]
    assert checker.matched == "Pari"
    checker = StopChecker(["Pari"], include_stop_str_in_output=True)
    assert [checker.feed("In "), checker.feed("Paris")] == ["In ", "Pari"]


def test_withheld_text_is_released_unchanged() -> None:
    checker = StopChecker(["</end>"])
    assert [checker.feed("a</e"), checker.feed("n"), checker.feed("x<")] == ["a", "", "</enx"]
    assert checker.finish() == "<"
    assert checker.matched is None


def test_h06_min_tokens() -> None:
    checker = StopChecker(["\n"], min_tokens=10)
    pieces = ["a", "\n", *"bcdefghijkl", "\n"]
    released, matched = run(pieces, checker)
    assert ("".join(released), matched) == ("a\nbcdefghijkl", "\n")


def test_stop_across_min_tokens_applies() -> None:
    checker = StopChecker(["END"], min_tokens=2)
    assert [checker.feed("x"), checker.feed("EN"), checker.feed("D")] == ["x", "", ""]
    assert checker.matched == "END"


def test_first_complete_stop_wins() -> None:
    assert run(["say hello world"], StopChecker(["world", "hello"]))[1] == "hello"
    assert run(["abcd"], StopChecker(["abcd", "bc"]))[1] == "bc"
    assert run(["xabc"], StopChecker(["bc", "abc"]))[1] == "abc"


def test_pending_text_may_complete_a_stop() -> None:
    checker = StopChecker(["\n"])
    assert checker.feed("a", pending="\n") == "a"
    assert checker.matched == "\n"
    checker = StopChecker(["\n\n"])
    assert [checker.feed("a", pending="\n"), checker.feed("\nb"), checker.finish()] == ["a", "\nb", ""]
    checker = StopChecker(["\n"], min_tokens=1)  # the pending newline belongs to the first token
    assert [checker.feed("", pending="\n"), checker.feed("\na")] == ["", "\na"]
    assert checker.matched is None


def test_byte_token_newline_stops_at_once(sentencepiece: Tokenizer) -> None:
    prompt = sentencepiece.encode("a")
    detokenizer = IncrementalDetokenizer(sentencepiece, prompt_token_ids=prompt)
    checker = StopChecker(["\n"])
    newline = sentencepiece.token_id("<0x0A>")
    assert newline is not None
    released = ""
    for token_id in [*sentencepiece.encode("one", False), newline]:
        assert checker.matched is None
        released += checker.feed(detokenizer.append(token_id), detokenizer.pending)
    assert (released.strip(), checker.matched) == ("one", "\n")


def test_match_in_the_detokenizers_last_text() -> None:
    checker = StopChecker(["\ufffd"])
    assert [checker.feed("a"), checker.finish("\ufffd")] == ["a", ""]
    assert checker.matched == "\ufffd"


@pytest.mark.parametrize("stop", ["a" * 20000, "ab" * 10000])
def test_long_stops_cost_no_more_than_their_length(stop: str) -> None:
    checker = StopChecker([stop])
    start = time.perf_counter()
    released = "".join(checker.feed(stop[:1000] + "x") for _ in range(100))
    assert time.perf_counter() - start < 2
    assert released == (stop[:1000] + "x") * 100
