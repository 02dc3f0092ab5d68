"""H01, H06, H07: what ends an output, and what is shown of it."""

import asyncio
import json
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from tests.conftest import TINY_OPTIONS
from tests.faults.scripted import Vocabulary, answers, scripted_async_llm
from tests.tiny import make_tiny_model

PIECES = ["DEF", "G", "HI", "J", "K", "Paris", "is", "DEFG", "HIJ", "JK", "\n", "word", " "]
VOCABULARY = Vocabulary(PIECES)


def params(**options) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 20} | options))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("pieces", [
    ["DEF", "G", "HI", "J", "K"], ["DEFG", "HIJ", "K"], ["DEF", "G", "HI", "JK"], ["D", "E", "F", "G", "H", "I", "J"],
], ids=" ".join)
def test_h01_a_stop_string_of_several_tokens_is_found_and_never_leaks(pieces, include):
    answer, = answers(VOCABULARY, {"a": VOCABULARY.ids(*pieces)},
                      params(stop="DEFGHIJ", include_stop_str_in_output=include))
    assert answer.text == ("DEFGHIJ" if include else "")
    assert answer.deltas[:-1] == [""] * (len(answer.deltas) - 1), "a piece of the stop was streamed"
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "DEFGHIJ")
    needed = next(n for n in range(len(pieces) + 1) if "DEFGHIJ" in "".join(pieces[:n]))
    assert answer.token_ids == VOCABULARY.ids(*pieces[:needed])


@pytest.mark.parametrize(("pieces", "stop", "text"), [
    (["word", " ", "Paris", "is"], "Pari", "word "),
    (["word", " ", "Paris", "is"], ["zzz", "ris"], "word Pa"),
    (["DEF", "G", "K", "DEFG", "HIJ"], ["HI", "DEFGHIJ"], "DEFGKDEFG"),  # the one that is complete first
    (["D", "D", "DEF"], "DDEF", "D"),  # begins again inside itself
], ids=str)
def test_h01_stops_need_not_end_on_a_token(pieces, stop, text):
    answer, = answers(VOCABULARY, {"a": VOCABULARY.ids(*pieces)}, params(stop=stop))
    assert answer.text == text and answer.finish_reason == "stop"


def test_h01_text_that_does_not_become_a_stop_is_released_unchanged():
    scripts = {"a": VOCABULARY.ids("DEF", "G", "HI", "K", "word"), "b": VOCABULARY.ids("DEF", "G", "HI")}
    first, second = answers(VOCABULARY, scripts, params(stop="DEFGHIJ", max_tokens=5))
    assert first.text == "DEFGHIKword" and first.finish_reason == "length" and first.stop_reason is None
    assert first.deltas == ["", "", "", "DEFGHIK", "word"]
    assert second.text == "DEFGHI~~"
    # Withheld until the last token, then released with it.
    cut, = answers(VOCABULARY, {"a": VOCABULARY.ids("DEF", "G", "HI")}, params(stop="DEFGHIJ", max_tokens=3))
    assert cut.text == "DEFGHI" and cut.finish_reason == "length"


def test_h01_an_end_token_releases_what_was_withheld():
    answer, = answers(VOCABULARY, {"a": [*VOCABULARY.ids("word", "DEF", "G"), VOCABULARY.eos]}, params(stop="DEFGHIJ"))
    assert answer.text == "wordDEFG" and (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_h01_many_requests_side_by_side_do_not_disturb_each_other():
    scripts = {letter: VOCABULARY.ids(*(["word"] * i), "DEF", "G", "HI", "J", "K")
               for i, letter in enumerate("abcdefg")}
    for i, answer in enumerate(answers(VOCABULARY, scripts, params(stop="DEFGHIJ"))):
        assert answer.text == "word" * i and answer.stop_reason == "DEFGHIJ"


def test_h06_stop_strings_wait_for_min_tokens():
    script = VOCABULARY.ids("word", "\n", *["word"] * 11, "\n", "word", "word")
    answer, = answers(VOCABULARY, {"a": script}, params(stop="\n", min_tokens=10))
    assert answer.text == "word\n" + "word" * 11
    assert len(answer.token_ids) == 14 and (answer.finish_reason, answer.stop_reason) == ("stop", "\n")
    for min_tokens, num_tokens in ((0, 2), (1, 2), (2, 14), (13, 14), (14, 20)):
        answer, = answers(VOCABULARY, {"a": script}, params(stop="\n", min_tokens=min_tokens))
        assert len(answer.token_ids) == num_tokens


def test_h06_stop_token_ids_wait_for_min_tokens_too():
    newline, = VOCABULARY.ids("\n")
    script = VOCABULARY.ids("word", "\n", "word", "\n", "word")
    answer, = answers(VOCABULARY, {"a": script}, params(stop_token_ids=[newline], min_tokens=3))
    assert answer.token_ids == script[:4] and answer.stop_reason == newline


def test_h07_every_eos_id_ends_the_output_unless_ignored():
    second, = VOCABULARY.ids("K")
    scripts = {"a": VOCABULARY.ids("word", " ", "K", "word"), "b": [*VOCABULARY.ids("word"), VOCABULARY.eos]}
    eos = [VOCABULARY.eos, second]
    first, other = answers(VOCABULARY, scripts, params(), eos_token_ids=eos)
    assert first.text == "word " and len(first.token_ids) == 3 and first.finish_reason == "stop"
    assert first.stop_reason is None and other.text == "word" and other.finish_reason == "stop"
    ignoring, = answers(VOCABULARY, {"a": scripts["a"]}, params(ignore_eos=True), eos_token_ids=eos)
    assert len(ignoring.token_ids) == 20 and ignoring.finish_reason == "length"
    assert ignoring.text.startswith("word Kword")
    own, = answers(VOCABULARY, {"a": scripts["a"]}, params(ignore_eos=True, stop_token_ids=[second]), eos_token_ids=eos)
    assert len(own.token_ids) == 3 and (own.finish_reason, own.stop_reason) == ("stop", second)
    shown, = answers(VOCABULARY, {"a": scripts["a"]}, params(include_stop_str_in_output=True), eos_token_ids=eos)
    assert shown.text == "word K"


@pytest.fixture(scope="module")
def two_eos_llm(tmp_path_factory: pytest.TempPathFactory):
    """Its generation config lists ids 2 (the tokenizer's) and 60 as ends."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("eos"))
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [2, 60]}))
    with LLM(str(folder), **TINY_OPTIONS) as llm:
        yield llm


def run(llm: LLM, **options):
    return llm.generate("The", params(**options), use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize("end", [2, 60])
def test_h07_generation_config_lists_ends(two_eos_llm, end):
    bias = {end: 100.0}
    default = run(two_eos_llm, logit_bias=bias)
    assert default.token_ids == [end] and default.text == "" and default.finish_reason == "stop"
    ignoring = run(two_eos_llm, logit_bias=bias, ignore_eos=True)
    assert ignoring.token_ids == [end] * 20 and ignoring.finish_reason == "length"
    own = run(two_eos_llm, logit_bias=bias, ignore_eos=True, stop_token_ids=[end])
    assert own.token_ids == [end] and own.stop_reason == end


def test_h07_no_end_can_be_chosen_before_min_tokens(two_eos_llm):
    for overrides in ({}, {"temperature": 1.0, "seed": 3}):
        held = run(two_eos_llm, logit_bias={2: 100.0, 60: 50.0}, min_tokens=5, **overrides)
        assert len(held.token_ids) == 6 and held.token_ids[-1] == 2 and held.finish_reason == "stop"
        assert not {2, 60} & set(held.token_ids[:5])
    ignoring = run(two_eos_llm, logit_bias={2: 100.0}, min_tokens=5, ignore_eos=True)
    assert ignoring.token_ids == [2] * 20, "without ends there is nothing to hold off"


def test_h07_what_is_forbidden_follows_a_preempted_request_into_another_slot(cramped_llm):
    prompts = [list(range(100, 160)), list(range(50, 94)), [11, 12, 13, 14]]
    held = params(min_tokens=20, max_tokens=26, logit_bias={2: 100.0})
    others = params(ignore_eos=True), held, params(ignore_eos=True, max_tokens=40)
    first, second, _ = cramped_llm.generate(prompts, others, use_tqdm=False)
    assert first.metrics.num_preemptions == 0 and second.metrics.num_preemptions > 0
    completion = second.outputs[0]
    assert 2 not in completion.token_ids[:20], "an end was chosen before min_tokens"
    assert completion.token_ids[20:] == [2], "ends stay forbidden after min_tokens"


def test_h01_streams_are_equal_whatever_else_runs():
    async def main() -> list[str]:
        llm = scripted_async_llm(VOCABULARY, {"a": VOCABULARY.ids("word", "DEF", "G", "HI", "J")}, max_num_seqs=2)
        try:
            async def one(delay: int) -> str:
                await asyncio.sleep(delay / 1000)
                outputs = [output async for output in llm.generate("a", params(stop="DEFGHIJ"))]
                return outputs[-1].outputs[0].text

            return await asyncio.gather(*(one(i) for i in range(12)))
        finally:
            llm.shutdown()

    assert asyncio.run(main()) == ["word"] * 12
