"""Buckets hold every plan, and are few."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import LLM
from jaxserve.request import Request, SamplingParams
from jaxserve.runner.buckets import Buckets
from jaxserve.scheduling.plan import Chunk, StepPlan
from tests.conftest import TINY_OPTIONS


def request(num_tokens: int) -> Request:
    return Request("r", list(range(num_tokens)), SamplingParams(), num_tokens + 1)


@given(st.integers(1, 300), st.integers(0, 2000), st.sampled_from([16, 64, 128]), st.data())
def test_every_plan_fits_its_bucket(max_num_seqs, extra, tile, data):
    budget = max_num_seqs + extra
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, query_tile=tile)
    num_decodes = data.draw(st.integers(0, max_num_seqs))
    lengths = data.draw(st.lists(st.integers(1, 200), max_size=max_num_seqs - num_decodes))
    while num_decodes + sum(lengths) > budget:
        lengths.pop()
    plan = StepPlan(decodes=[request(1)] * num_decodes, chunks=[Chunk(request(n), 0, n, True) for n in lengths])
    if plan.is_empty:
        return
    bucket = buckets.pick(plan)
    assert bucket in buckets.all() and bucket.is_decode == (not lengths)
    assert bucket.num_tokens >= plan.num_tokens and bucket.num_seqs >= len(plan.rows())
    if lengths:
        assert bucket.num_tiles >= sum(-(-n // tile) for n in lengths)
        assert bucket.num_tokens < max(2 * plan.num_tokens, 17), "padding doubles the work at most"


@given(st.integers(1, 9), st.integers(0, 400), st.integers(1, 400), st.integers(1, 2), st.booleans())
def test_prompts_by_themselves_have_buckets_of_their_own(max_num_seqs, extra, length, num_chunks, with_decode):
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + extra, query_tile=64)
    chunk = Chunk(request(length), 0, length, True)
    plan = StepPlan(decodes=[request(1)] * with_decode, chunks=[chunk] * num_chunks)
    found = buckets.lone_for(plan)
    assert bool(found) == (num_chunks == 1 and not with_decode and length <= max_num_seqs + extra)
    for bucket in found:
        assert bucket.is_lone and bucket not in buckets.all() and bucket.num_tokens >= length
        assert bucket.num_tiles * 64 >= bucket.num_tokens and bucket.num_seqs == 1


def test_there_are_few():
    buckets = Buckets(max_num_seqs=256, max_num_batched_tokens=8192, query_tile=64)
    assert [b.num_tokens for b in buckets.decode] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [b.num_tokens for b in buckets.mixed] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert [b.name for b in buckets.lone] == [f"lone-{size}" for size in (64, 128, 256, 512, 1024, 2048, 4096, 8192)]


@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (3, 5), (24, 100)])
def test_odd_limits_are_buckets_themselves(max_num_seqs, budget):
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, query_tile=64)
    assert buckets.decode[-1].num_tokens == max_num_seqs and buckets.mixed[-1].num_tokens == budget


def test_decode_buckets_of_a_gpu_start_at_eight() -> None:
    options: dict[str, Any] = dict(max_num_batched_tokens=64, query_tile=64, platform="gpu")
    assert [bucket.num_seqs for bucket in Buckets(max_num_seqs=20, **options).decode] == [8, 16, 20]
    few = Buckets(max_num_seqs=3, **options)
    assert [bucket.num_seqs for bucket in few.all()] == [8] * 4
    assert [bucket.num_tiles for bucket in few.mixed] == [4] * 3 and not few.lone


def test_more_rows_than_sequences_change_no_token(tiny_folder, tiny_llm, monkeypatch) -> None:
    """As on a GPU: three sequences at most, eight rows in every step."""
    prompts = [[5, 6, 7], list(range(3, 23)), [9], [8] * 40]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in tiny_llm.generate(prompts, params, use_tqdm=False)]
    monkeypatch.setattr("jaxserve.runner.buckets.FEWEST_SEQS", {"cpu": 8})
    with LLM(str(tiny_folder), **(TINY_OPTIONS | dict(max_num_seqs=3))) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert {bucket.num_seqs for bucket in llm._engine.runner.buckets.all()} == {8}
    assert [output.outputs[0].token_ids for output in outputs] == expected
