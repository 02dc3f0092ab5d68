"""What a caller can get wrong: a jaxserve error with field, value and what is allowed; nothing else is disturbed."""

import json
import math

import numpy as np
import pytest

from jaxserve import LLM, MeshConfig, SamplingParams, generate
from jaxserve.errors import (
    InvalidInputError,
    JaxserveError,
    ModelNotFoundError,
    OutOfMemoryError,
    PromptTooLongError,
    UnsupportedModelError,
)
from tests.conftest import TINY_OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_unknown_model_paths(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path, "", "no-such-org/no-such-model", tmp_path / "x.gguf"):
        with pytest.raises((ModelNotFoundError, InvalidInputError)) as caught:
            LLM(str(path))
        assert caught.value.field == "model" and str(path) in str(caught.value)
    with pytest.raises(ModelNotFoundError):
        generate("Hi", model=str(tmp_path / "nowhere"))


def test_an_unsupported_architecture_is_named_with_the_supported(tmp_path, tiny_folder):
    config = json.loads((tiny_folder / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM") as caught:
        LLM(str(tmp_path))
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert name in str(caught.value)


BAD_OPTIONS: list = [
    ("dtype", "float8"), ("dtype", 3), ("dtype", ["float32"]),
    *((name, value) for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
      for value in (0, -1, "5", 1.5, True)),
    ("max_model_len", 100_000),  # more than the model's
    ("num_gpu_blocks_override", 1), ("num_gpu_blocks_override", "9"),
    ("block_size", 0), ("block_size", None), ("block_size", 4.0),
    ("seed", -1), ("seed", None), ("seed", "x"),
    ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.1), ("gpu_memory_utilization", math.nan),
    ("gpu_memory_utilization", "0.9"), ("async_scheduling", "no"), ("async_scheduling", None),
    ("mesh", 2), ("mesh", {"tensor": 2}), ("mesh", "tensor"),
    ("compilation_cache_dir", 5),
    ("tensor_parallel_size", 0), ("tensor_parallel_size", 1000), ("tensor_parallel_size", "2"),
    ("no_such_option", 1), ("max_tokens", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD_OPTIONS, ids=lambda item: repr(item)[:30])
def test_bad_options(tiny_folder, name, value):
    options = TINY_OPTIONS | {name: value}
    if name == "kv_cache_memory_bytes":
        del options["num_gpu_blocks_override"]
    with pytest.raises(InvalidInputError) as caught:
        LLM(str(tiny_folder), **options).close()
    assert caught.value.field in (name, "mesh.tensor") and caught.value.allowed
    assert repr(value)[:60] in str(caught.value)


def test_a_tokenizer_and_none_at_all_contradict_each_other(tiny_folder):
    with pytest.raises(InvalidInputError, match="skip_tokenizer_init"):
        LLM(str(tiny_folder), tokenizer=str(tiny_folder), skip_tokenizer_init=True)


def test_an_unknown_option_lists_the_known_ones(tiny_folder):
    with pytest.raises(InvalidInputError, match="max_num_seq=") as caught:
        LLM(str(tiny_folder), max_num_seq=4)
    assert "max_num_seqs" in caught.value.allowed and "block_size" in caught.value.allowed


@pytest.mark.parametrize(("options", "field"), [
    (dict(max_num_seqs=64, max_num_batched_tokens=32), "max_num_batched_tokens"),
    (dict(tensor_parallel_size=2, mesh=MeshConfig(tensor=1)), "tensor_parallel_size"),
    (dict(max_model_len=257), "max_model_len"),
    (dict(mesh=MeshConfig(tensor=10_000)), "mesh.tensor"),
], ids=str)
def test_conflicting_options(tiny_folder, options, field):
    with pytest.raises(InvalidInputError) as caught:
        LLM(str(tiny_folder), **options)
    assert caught.value.field == field


def test_memory_for_not_even_two_blocks(tiny_folder):
    with pytest.raises(OutOfMemoryError, match=r"kv_cache_memory_bytes=1000.*1000 bytes"):
        LLM(str(tiny_folder), kv_cache_memory_bytes=1000)


BAD_PARAMS: list = [
    ("n", 0), ("n", 1.5), ("n", True), ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan),
    ("temperature", "hot"), ("temperature", None), ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("top_k", -2),
    ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("seed", "a"), ("seed", 2**63), ("seed", -(2**64)),
    ("max_tokens", 0),
    ("max_tokens", -1), ("max_tokens", 2.0), ("min_tokens", -1), ("min_tokens", 17), ("stop", [""]), ("stop", ""),
    ("stop", [5]), ("stop", 5), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("frequency_penalty", math.nan),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf), ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}), ("logit_bias", {"a": 1}), ("logit_bias", [1]), ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]), ("allowed_token_ids", 7), ("bad_words", [""]), ("bad_words", [5]),
    ("bad_words", 5),
    ("logprobs", -1), ("logprobs", 21), ("logprobs", 1.0), ("logprobs", True), ("prompt_logprobs", -1),
    ("prompt_logprobs", 21), ("include_stop_str_in_output", "yes"), ("ignore_eos", 1.5),
    ("skip_special_tokens", None), ("detokenize", "x"), ("output_kind", "delta"),
]
@pytest.mark.parametrize(("name", "value"), BAD_PARAMS, ids=lambda item: repr(item)[:30])
def test_bad_sampling_params(name, value):
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name and caught.value.allowed and name in str(caught.value)


@pytest.mark.parametrize("options", [
    dict(n=2, temperature=0), dict(stop="x", detokenize=False), dict(min_tokens=5, max_tokens=4),
], ids=str)
def test_conflicting_sampling_params(options):
    with pytest.raises(InvalidInputError):
        SamplingParams(**options)


def test_good_extremes_are_accepted():
    SamplingParams(temperature=1e-9, top_p=1e-9, top_k=10**9, min_p=1, seed=-(2**62), max_tokens=None, min_tokens=10**6)
    SamplingParams(logprobs=0, prompt_logprobs=20, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3)
    SamplingParams(stop=[], stop_token_ids=[], bad_words=[], logit_bias={}, top_k=-1)


@pytest.mark.parametrize(("prompt", "kind"), [
    ("x" * 500, PromptTooLongError), ([10**6], InvalidInputError), ([-1], InvalidInputError),
    ([1.5], InvalidInputError),
    ([True], InvalidInputError), ([[]], InvalidInputError), ([None], InvalidInputError), (5, InvalidInputError),
    (None, InvalidInputError), ({"prompt": 5}, InvalidInputError), ({"text": "a"}, InvalidInputError),
    ({"prompt": "a", "prompt_token_ids": [1]}, InvalidInputError), ([["a", "b"]], InvalidInputError),
    ([{"role": "user"}], InvalidInputError), ([{"content": "no role"}], InvalidInputError),
    (b"bytes", InvalidInputError),
    ([[1, "a"]], InvalidInputError), ("\ud800", InvalidInputError),
], ids=lambda item: repr(item)[:25])
def test_bad_prompts(tiny_llm, prompt, kind):
    with pytest.raises(kind):
        tiny_llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_both_numbers_of_a_long_prompt_are_said(tiny_llm):
    with pytest.raises(PromptTooLongError, match=r"129 tokens.*at most 128 tokens"):
        tiny_llm.generate([5] * 129, GREEDY, use_tqdm=False)


def test_one_bad_prompt_among_good_ones(tiny_llm):
    bad = ["x" * 500, [10**6], [], None, {"prompt": 5}, [1.5], "\ud800"]
    good = ["The", [5, 6], [{"role": "user", "content": "Hi"}], {"prompt": "fox"}]
    mixed = [item for pair in zip(good * 2, bad, strict=False) for item in pair]
    outputs = tiny_llm.generate(mixed, GREEDY, use_tqdm=False)
    for i, output in enumerate(outputs):
        assert output.finished
        if i % 2:
            assert isinstance(output.error, InvalidInputError) and f"prompts[{i}]" in str(output.error)
            assert not output.outputs
        else:
            assert output.error is None and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("given", [[GREEDY], [GREEDY] * 3, {"temperature": 0}, "greedy", 5, [GREEDY, None], [{}, {}]],
                         ids=lambda given: type(given).__name__)
def test_bad_lists_of_params(tiny_llm, given):
    with pytest.raises(InvalidInputError) as caught:
        tiny_llm.generate(["The", "fox"], given, use_tqdm=False)
    assert caught.value.field.startswith("sampling_params")
    assert len(tiny_llm.generate("The", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_bad_priorities(tiny_llm):
    with pytest.raises(InvalidInputError, match="priority"):
        tiny_llm.generate(["The", "fox"], GREEDY, use_tqdm=False, priority=[1])


def test_numpy_ids_are_ids(tiny_llm):
    expected = tiny_llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    array = np.array([5, 6, 7])
    for prompt in (list(array), tuple(array), [list(array)]):
        output = tiny_llm.generate(prompt, GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected and all(type(i) is int for i in output.prompt_token_ids)


def test_without_a_tokenizer_only_ids(tiny_folder):
    with LLM(str(tiny_folder), skip_tokenizer_init=True, **TINY_OPTIONS) as llm:
        for prompt in ("text", [{"role": "user", "content": "Hi"}], {"prompt": "text"}):
            with pytest.raises(InvalidInputError, match="no tokenizer"):
                llm.generate(prompt, GREEDY, use_tqdm=False)
        for options in ({"stop": "x"}, {"bad_words": ["x"]}):
            with pytest.raises(InvalidInputError, match=next(iter(options))):
                llm.generate([5], SamplingParams(**options), use_tqdm=False)
        output, = llm.generate([5, 6], GREEDY, use_tqdm=False)
        assert output.outputs[0].text == "" and len(output.outputs[0].token_ids) == 3 and llm.get_tokenizer() is None


def test_all_errors_have_one_base():
    for error in (InvalidInputError, PromptTooLongError, ModelNotFoundError, UnsupportedModelError, OutOfMemoryError):
        assert issubclass(error, JaxserveError)
    assert issubclass(InvalidInputError, ValueError)
