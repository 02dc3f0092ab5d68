"""KV blocks in host memory: nothing is computed twice, nothing is lost or left over, and nothing compiles late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidInputError
from jaxserve.request import Request
from tests.conftest import TINY_OPTIONS
from tests.engine.compilations import count_compilations

PROMPTS = [[3 + i] * 20 for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SWAP: dict[str, Any] = TINY_OPTIONS | dict(skip_tokenizer_init=True, swap_space=0.001, preemption_mode="swap",
                                           enable_prefix_caching=False, num_gpu_blocks_override=33)


def count_tokens(llm: LLM) -> list[int]:
    """Tokens of each step from now on."""
    scheduler, counts = llm._engine.scheduler, []
    schedule = scheduler.schedule

    def counted() -> Any:
        plan = schedule()
        counts.append(plan.num_tokens)
        return plan

    scheduler.schedule = counted  # type: ignore[method-assign]
    return counts


def until_swapped(llm: LLM) -> Request:
    """Adds the prompts and steps until one waits with its blocks on the host."""
    for i, prompt in enumerate(PROMPTS):
        llm._engine.add(*llm._serving.inputs.make(f"r{i}", prompt, GREEDY))
    for _ in range(200):
        llm._engine.step()
        for request in llm._engine.scheduler.waiting:
            if request.host_block_ids:
                return request
    raise AssertionError("nothing was swapped")


def run_out(llm: LLM) -> dict[str, list[int]]:
    found = {}
    while llm._engine.has_unfinished:
        found.update({output.request_id: output.outputs[0].token_ids for output in llm._engine.step()})
    return found


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> list[list[int]]:
    with LLM(str(tiny_folder), skip_tokenizer_init=True, **TINY_OPTIONS) as llm:
        return tokens(llm)


def test_nothing_is_computed_twice(tiny_folder: Path, expected: list[list[int]]) -> None:
    """Each request computes 59 of its 60 tokens, since the last is only sampled."""
    computed = {}
    for mode in ("swap", "recompute"):
        with LLM(str(tiny_folder), **(SWAP | dict(preemption_mode=mode))) as llm:
            counts = count_tokens(llm)
            assert tokens(llm) == expected
            assert llm._engine.scheduler.num_preemptions > 0
            assert (llm.memory_report().num_swapped > 0) is (mode == "swap")
            computed[mode] = sum(counts)
    assert computed["swap"] == 4 * (20 + 40 - 1) < computed["recompute"]


def test_auto_swaps_what_is_dear_to_compute(tiny_folder: Path) -> None:
    """The tiny model's tokens cost less than a copy; with a slow enough processor they do not."""
    for slower, swaps in ((1.0, False), (1e6, True)):
        with LLM(str(tiny_folder), **(SWAP | dict(preemption_mode="auto"))) as llm:
            host = llm._engine.scheduler.host
            assert host is not None
            costs = host._memory.costs
            object.__setattr__(costs, "flops_per_s", costs.flops_per_s / slower)
            tokens(llm)
            assert llm._engine.scheduler.num_preemptions > 0 and (host.num_swapped > 0) is swaps


def test_evicted_prefixes_come_back_from_the_host(tiny_folder: Path) -> None:
    """The first prompt's blocks leave the device for the second's; the third finds them on the host."""
    options = SWAP | dict(enable_prefix_caching=True, num_gpu_blocks_override=25)
    first, other = [5, *range(10, 70)], [6, *range(10, 90)]
    few = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    with LLM(str(tiny_folder), **options) as llm:
        host = llm._engine.scheduler.host
        assert host is not None
        object.__setattr__(host._memory.costs, "flops_per_s", 1.0)  # fetching always pays
        alone, = llm.generate([first], few, use_tqdm=False)
        llm.generate([other], few, use_tqdm=False)
        assert llm.memory_report().num_host_cached > 0
        counts = count_tokens(llm)
        again, = llm.generate([first], few, use_tqdm=False)
        assert again.num_cached_tokens == 60 and sum(counts) == 1 + 3
        assert llm.memory_report().num_blocks_back > 0
        assert again.outputs[0].token_ids == alone.outputs[0].token_ids
        llm._engine.scheduler.check_integrity()
        object.__setattr__(host._memory.costs, "flops_per_s", 1e30)  # never
        llm.generate([other], few, use_tqdm=False)
        back = host.num_blocks_back
        last, = llm.generate([first], few, use_tqdm=False)
        assert last.num_cached_tokens < 60 and host.num_blocks_back == back
        assert last.outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_swapped_request_that_ends_frees_its_host_blocks(tiny_folder: Path, expected: list[list[int]]) -> None:
    with LLM(str(tiny_folder), **SWAP) as llm:
        swapped = until_swapped(llm)
        host = llm._engine.scheduler.host
        assert host is not None and host.pool.num_used == len(swapped.host_block_ids) > 0
        gone = swapped.request_id.split("-")[0]
        llm._engine.abort(gone)
        assert not swapped.host_block_ids
        llm._engine.scheduler.check_integrity()
        found = run_out(llm)
        assert host.pool.num_used == 0 and host.pool.num_free == host.pool.num_blocks - 1
        assert {name: ids for name, ids in found.items() if name != gone} == {
            f"r{i}": ids for i, ids in enumerate(expected) if f"r{i}" != gone}


def test_new_weights_drop_what_lies_on_the_host(tiny_folder: Path) -> None:
    """What the swapped request had computed comes from the old weights; all of it is computed again."""
    with LLM(str(tiny_folder), **SWAP) as llm:
        swapped = until_swapped(llm)
        host = llm._engine.scheduler.host
        assert host is not None
        other = {path: np.asarray(array)[..., ::-1].copy() for path, array in llm._engine.runner.params().items()}
        llm._engine.drain()
        known = {request.request_id: request.prompt_token_ids + request.output_token_ids
                 for request in llm._engine.scheduler.requests()}
        llm.update_weights(other)
        assert not swapped.host_block_ids and host.pool.num_used == host.pool.num_cached == 0
        found = run_out(llm)
    with LLM(str(tiny_folder), **TINY_OPTIONS, skip_tokenizer_init=True) as llm:
        llm.update_weights(other)
        for name, before in known.items():
            rest = SamplingParams(temperature=0, max_tokens=60 - len(before), ignore_eos=True)
            fresh, = llm.generate([before], rest, use_tqdm=False)
            assert found[name.split("-")[0]] == before[20:] + fresh.outputs[0].token_ids


@pytest.mark.parametrize("compression", [False, True])
def test_after_warm_up_swapping_compiles_nothing(tiny_folder: Path, expected: list[list[int]],
                                                 compression: bool) -> None:
    with LLM(str(tiny_folder), **SWAP, swap_compression=compression) as llm:
        llm.warmup()
        with count_compilations() as counts:
            assert tokens(llm) == expected
        report = llm.memory_report()
        assert report.num_blocks_out > 0 and report.num_blocks_back > 0 and not counts
        assert report.compression_ratio is not None
        assert (report.compression_ratio == 1.0) is not compression


def test_the_profiler_draws_a_curve_and_finds_lost_references(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **SWAP, enable_memory_profiler=True) as llm:
        tokens(llm)
        report = llm.memory_report()
        assert report.unexplained == {}
        assert max(point.used for point in report.curve) == 32 and max(point.running for point in report.curve) == 4
        assert max(point.host_used for point in report.curve) > 0 == report.curve[-1].host_used
        assert all(point.used + point.cached + point.free == 32 for point in report.curve)
        lost = llm._engine.scheduler.pool.allocate(1)
        assert lost is not None and llm.memory_report().unexplained == {lost[0]: 1}
    with LLM(str(tiny_folder), **SWAP) as llm:
        tokens(llm)
        assert llm.memory_report().curve == () and llm.memory_report().unexplained is None


@pytest.mark.parametrize(("options", "message"), [
    (dict(swap_space=-1), "swap_space=-1 "), (dict(swap_space=float("nan")), "swap_space=nan"),
    (dict(swap_space="4"), "swap_space='4'"), (dict(swap_space=1e-9), "swap_space=1e-09 .* at least one block"),
    (dict(preemption_mode="swap"), "preemption_mode='swap' .* swap_space"),
    (dict(swap_space=1, preemption_mode="drop"), "one of auto, recompute, swap"),
    (dict(swap_compression=True), "swap_compression=True .* swap_space"),
    (dict(swap_space=1, swap_compression=1), "swap_compression=1 "),
])
def test_refused_options(tiny_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        LLM(str(tiny_folder), **TINY_OPTIONS, **options)
