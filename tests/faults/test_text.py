"""H02, H03, H09, H12: bytes that are no text, texts of single tokens, and who writes the BOS."""

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from jaxserve import SamplingParams
from jaxserve.errors import InvalidInputError
from jaxserve.text import Tokenizer
from tests.faults.scripted import Vocabulary, answers
from tests.text.conftest import sentencepiece_backend
from tests.tiny import make_tiny_model, reference_logprobs, save_tokenizer, tiny_tokenizer

EMOJI, CHAR = "😀".encode(), "日".encode()
VOCABULARY = Vocabulary([CHAR[:2], CHAR[1:], EMOJI[:2], EMOJI[2:], EMOJI[:3], b"\xff\xfe", "Hello", " world",
                         b" \xf0\x9f"])
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("pieces", [
    [CHAR[:2], "H", "Hello", EMOJI[:2], EMOJI[2:], " world"],
    [EMOJI[:3], "H", EMOJI[:3], EMOJI[3:], "H"],
    [CHAR[1:], CHAR[1:], "Hello"],  # bytes that never begin a character
    [b"\xff\xfe", "H", b"\xff\xfe"],
    [CHAR[:2], CHAR[:2], CHAR[2:], "H"],  # given up, then a whole one
    [b" \xf0\x9f", EMOJI[2:], "H"],
    [EMOJI[:2]],  # the end comes in the middle of it
], ids=str)
def test_h02_broken_utf8_neither_raises_nor_disturbs_a_neighbour(pieces):
    script, other = VOCABULARY.ids(*pieces), VOCABULARY.ids("Hello", " world", EMOJI[:2], EMOJI[2:], "H")
    broken, neighbour = answers(VOCABULARY, {"a": [*script, VOCABULARY.eos], "b": [*other, VOCABULARY.eos]}, GREEDY)
    assert broken.text == b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces).decode("utf-8", "replace")
    assert broken.text == VOCABULARY.tokenizer.decode(broken.token_ids)
    assert neighbour.text == "Hello world😀H" and not any("�" in delta for delta in neighbour.deltas)
    if "😀" in broken.text:
        assert sum("😀" in delta for delta in broken.deltas) == 1, "a split character is shown once, whole"
    assert sum(delta.count("�") for delta in broken.deltas) == broken.text.count("�")


def test_h02_a_length_limit_inside_a_character_ends_it_cleanly():
    script = VOCABULARY.ids("H", EMOJI[:2], EMOJI[2:])
    answer, = answers(VOCABULARY, {"a": script}, SamplingParams(temperature=0, max_tokens=2))
    assert answer.text == "H�" and answer.finish_reason == "length"


def test_h02_a_stop_string_after_broken_bytes_is_found():
    answer, = answers(VOCABULARY, {"a": VOCABULARY.ids(CHAR[:2], "Hello", " world")},
                      SamplingParams(temperature=0, max_tokens=12, stop=["lo w"]))
    assert answer.text == "�Hel" and answer.stop_reason == "lo w"


def small_sentencepiece(num_tokens: int) -> Tokenizer:
    """With BOS and byte tokens; the first tokens only, so that a tiny model has room for them."""
    content = json.loads(sentencepiece_backend().to_str())
    model = content["model"]
    model["vocab"] = {token: token_id for token, token_id in model["vocab"].items() if token_id < num_tokens}
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
    return Tokenizer(Backend.from_str(json.dumps(content)), {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("prompt", ["\n1. one\n2. two 3", "\n\n\n10 2024\n", "Hello  world", "naïve 日 café 3"],
                         ids=repr)
def test_h03_prompt_logprobs_are_those_of_the_tokens_that_are_there(tiny_llm, tiny_reference, monkeypatch, prompt):
    tokenizer = small_sentencepiece(tiny_llm._serving.model.vocab_size)
    monkeypatch.setattr(tiny_llm._serving.inputs, "tokenizer", tokenizer)
    monkeypatch.setattr(tiny_llm._engine, "tokenizer", tokenizer)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1, prompt_logprobs=1,
                            skip_special_tokens=False)
    output, = tiny_llm.generate(prompt, params, use_tqdm=False)
    ids, completion = output.prompt_token_ids, output.outputs[0]
    assert ids[0] == 1 and ids.count(1) == 1, "one BOS"
    assert "".join(tokenizer.token_texts(ids)) == prompt, "token texts, BOS aside, join to the prompt"
    entries, all_ids = [*output.prompt_logprobs, *completion.logprobs], ids + completion.token_ids
    assert len(entries) == len(all_ids) == len(ids) + 5 and entries[0] is None
    reference = reference_logprobs(tiny_reference, all_ids)
    for position, (token_id, entry) in enumerate(zip(all_ids[1:], entries[1:], strict=True)):
        assert entry[token_id].logprob == pytest.approx(reference[position, token_id].item(), abs=1e-4)
        assert int(torch.argmax(reference[position])) in entry
    texts = [entry[token_id].decoded_token for token_id, entry in zip(all_ids[1:], entries[1:], strict=True)]
    assert "".join(texts[: len(ids) - 1]) == prompt and "".join(texts[len(ids) - 1 :]) == completion.text


def bos_folder(tmp_path_factory, template: str):
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single=["<|endoftext|>", "$A"],
                                                           special_tokens=[("<|endoftext|>", 0)])
    folder = make_tiny_model(tmp_path_factory.mktemp("bos"))
    save_tokenizer(folder, backend, chat_template=template)
    return folder


BODY = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(("template", "num_bos"), [("{{ bos_token }}" + BODY, 1), (BODY, 0)],
                         ids=["with BOS", "without"])
def test_h12_the_template_decides_on_the_bos_of_a_chat(tiny_llm, tmp_path_factory, monkeypatch, template, num_bos):
    tokenizer = Tokenizer.from_folder(bos_folder(tmp_path_factory, template))
    monkeypatch.setattr(tiny_llm._serving.inputs, "tokenizer", tokenizer)
    chat = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "fox"}]
    rendered = template.count("bos_token") * "<|endoftext|>" + "<|im_start|>Hi there<|im_end|><|im_start|>fox<|im_end|>"
    plain, = tiny_llm.generate("Hi there", GREEDY, use_tqdm=False)
    assert plain.prompt_token_ids[0] == 0 and plain.prompt_token_ids.count(0) == 1
    for output in (tiny_llm.chat(chat, GREEDY, use_tqdm=False)[0], tiny_llm.generate(chat, GREEDY, use_tqdm=False)[0],
                   tiny_llm.generate([chat, "x"], GREEDY, use_tqdm=False)[0]):
        assert output.prompt == rendered
        assert output.prompt_token_ids == tokenizer.encode(rendered, add_special_tokens=False)
        assert output.prompt_token_ids.count(0) == num_bos


def test_h09_an_empty_prompt_is_an_error_or_one_bos(tiny_llm, tmp_path_factory, monkeypatch):
    empties: tuple[Any, ...] = ("", {"prompt": ""}, {"prompt_token_ids": []}, [[]], [""])
    for empty in empties:
        with pytest.raises(InvalidInputError, match="at least one token"):
            tiny_llm.generate(empty, GREEDY, use_tqdm=False)
        assert tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    mixed = tiny_llm.generate(["The", "", []], GREEDY, use_tqdm=False)
    assert mixed[0].outputs[0].token_ids and all(isinstance(o.error, InvalidInputError) for o in mixed[1:])
    tokenizer = Tokenizer.from_folder(bos_folder(tmp_path_factory, BODY))
    monkeypatch.setattr(tiny_llm._serving.inputs, "tokenizer", tokenizer)
    output, = tiny_llm.generate("", GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == [0] and output.outputs[0].token_ids
    with pytest.raises(InvalidInputError, match="at least one token"):
        tiny_llm.generate([[]], GREEDY, use_tqdm=False)
