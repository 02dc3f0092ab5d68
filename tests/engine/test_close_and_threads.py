"""Using an LLM after its end, and from several threads."""

import threading

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import EngineDeadError, InvalidInputError
from jaxserve.runner.kv_cache import parts
from tests.conftest import TINY_OPTIONS
from tests.engine.test_generate import GREEDY, TEXTS


def test_a_closed_llm_says_so_and_frees_its_cache(tiny_folder):
    llm = LLM(str(tiny_folder), **TINY_OPTIONS)
    k_cache, _ = parts(llm._engine.runner._state.caches[0][0])
    llm.close()
    assert k_cache.is_deleted()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("Hi", GREEDY)
    llm.close()


def test_threads_wait_for_each_other(tiny_llm):
    expected = [o.outputs[0].token_ids for o in tiny_llm.generate(TEXTS, GREEDY, use_tqdm=False)]
    found: list = []

    def work() -> None:
        found.append([o.outputs[0].token_ids for o in tiny_llm.generate(TEXTS, GREEDY, use_tqdm=False)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [expected] * 4


def test_arrays_are_token_ids(tiny_llm):
    np = pytest.importorskip("numpy")
    one = tiny_llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for prompt in (np.array([5, 6, 7]), [np.array([5, 6, 7])], np.array([[5, 6, 7]]),
                   {"prompt_token_ids": np.array([5, 6, 7])}):
        assert tiny_llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == one


def test_extreme_top_k_is_all(tiny_llm):
    params = [SamplingParams(temperature=1, seed=3, top_k=k, max_tokens=5) for k in (0, 10**6, 2**31, 2**40)]
    tokens = [o.outputs[0].token_ids for o in tiny_llm.generate(["fox"] * 4, params, use_tqdm=False)]
    assert tokens == [tokens[0]] * 4


def test_only_allowed_tokens_come_out(tiny_llm):
    with pytest.raises(InvalidInputError, match="allowed_token_ids"):
        tiny_llm.generate("fox", SamplingParams(allowed_token_ids=[2], min_tokens=3), use_tqdm=False)
    text = tiny_llm.get_tokenizer()
    word, = text.encode("f")
    params = SamplingParams(temperature=0, allowed_token_ids=[word], bad_words=["f"], max_tokens=4)
    assert tiny_llm.generate("fox", params, use_tqdm=False)[0].outputs[0].token_ids == [word] * 4
