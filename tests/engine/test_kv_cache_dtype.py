"""KV caches in 8 bits: nearly the same log-probabilities, half or a quarter of the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidInputError
from jaxserve.runner.kv_cache import ScaledCache, parts
from tests.conftest import TINY_OPTIONS

PROMPTS = [list(range(3, 40)), [7] * 5, [90, 4, 61, 33]]


def prompt_logprobs(folder: Path, **options: Any) -> np.ndarray:
    """Chunked: later chunks read what earlier ones wrote. Decodes follow."""
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(folder), skip_tokenizer_init=True, **(TINY_OPTIONS | options)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        cache = llm._engine.runner._state.caches[0][0]
        assert parts(cache)[0].dtype == {"auto": jnp.float32, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}[
            options["kv_cache_dtype"]]
        if isinstance(cache, ScaledCache):
            assert np.asarray(cache.scale).min() > 0
    found = [next(iter(entry.values())).logprob for output in outputs
             for entry in (output.prompt_logprobs or [])[1:] if entry]
    return np.array(found)


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> np.ndarray:
    return prompt_logprobs(tiny_folder, kv_cache_dtype="auto")


@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 0.05), ("fp8", 0.2)])
def test_log_probabilities_stay_close(tiny_folder: Path, exact: np.ndarray, dtype: str, tolerance: float) -> None:
    """Their deviation is 2; numbers of 4 bits less, or saturated ones, would be off by more."""
    assert exact.std() > 1.5
    stored = prompt_logprobs(tiny_folder, kv_cache_dtype=dtype)
    assert 0 < np.abs(stored - exact).mean() < tolerance


def test_scales_too_small_show(tiny_folder: Path, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the sample text is looked at matters."""
    monkeypatch.setattr("jaxserve.runner.kv_scales.HEADROOM", 0.1)
    assert np.abs(prompt_logprobs(tiny_folder, kv_cache_dtype="int8") - exact).mean() > 0.2


def test_new_weights_get_scales_of_their_own(tiny_folder: Path, exact: np.ndarray) -> None:
    """The old ones were all nearly zero, and so were their keys and values."""
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    options: dict[str, Any] = dict(skip_tokenizer_init=True, kv_cache_dtype="int8", **TINY_OPTIONS)
    with LLM(str(tiny_folder), **options) as llm:
        weights = {path: np.asarray(array) for path, array in llm._engine.runner.params().items()}
        llm.update_weights({path: array / 50 if ".qkv." in path else array for path, array in weights.items()})
        llm.generate(PROMPTS, params, use_tqdm=False)
        llm.update_weights(weights)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    found = [next(iter(entry.values())).logprob for output in outputs
             for entry in (output.prompt_logprobs or [])[1:] if entry]
    assert np.abs(np.array(found) - exact).mean() < 0.05


def test_memory_buys_four_times_the_blocks(tiny_folder: Path) -> None:
    memory = TINY_OPTIONS | dict(num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 15)
    counts = {}
    for dtype in ("auto", "int8"):
        with LLM(str(tiny_folder), kv_cache_dtype=dtype, **memory) as llm:
            counts[dtype] = llm._engine.scheduler.pool.num_blocks
    assert counts["int8"] == 4 * counts["auto"]


def test_unknown_dtypes_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"kv_cache_dtype='int4'.*auto, fp8, fp8_e4m3, int8"):
        LLM(str(tiny_folder), kv_cache_dtype="int4")
