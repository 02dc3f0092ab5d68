"""Bounds on speed, against arithmetic from the card's peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.planning.known import read_model
from jaxserve.planning.measure import StepBytes
from jaxserve.planning.planner import Plan
from jaxserve.planning.roofline import Roofline
from jaxserve.targets.target import get_target


def test_one_sequence_is_bound_by_reading_the_weights(plans: dict[str, Plan]) -> None:
    plan = plans["8B bf16"]
    read = 2 * (8_030_261_248 - 128_256 * 4096)  # all but the embedding, of which one row is read
    kv = 1024 * 2 * 32 * 8 * 128 * 2
    bound = plan.roofline.decode(1024, 1)
    assert bound.limit == "memory"
    assert bound.seconds == pytest.approx((read + kv) / 600e9, rel=0.01)
    assert plan.decode_tokens_per_s(1024, 1) == pytest.approx(600e9 / (read + kv), rel=0.01)


def test_a_prompt_is_bound_by_its_products(plans: dict[str, Plan]) -> None:
    plan = plans["8B bf16"]
    products = 2 * 1024 * 6_979_321_856 + 2 * 128_256 * 4096  # the projections of each row, the output head of one
    attention = 4 * 32 * 4096 * 1024 * 1025 / 2  # two products of 4,096 numbers with each key at or before the query
    bound = plan.time_to_first_token(1024)
    assert bound.limit == "compute"
    assert bound.seconds == pytest.approx((products + attention) / 70e12, rel=0.01)


def test_a_long_prompt_goes_in_chunks_and_reads_the_weights_for_each(plans: dict[str, Plan]) -> None:
    plan = plans["8B bf16"]
    whole, twice = plan.time_to_first_token(8192).seconds, plan.time_to_first_token(16384).seconds
    assert 2 * whole < twice < 2.6 * whole  # attention grows with the square


def test_cards_share_the_work_and_exchange_rows(plans: dict[str, Plan]) -> None:
    plan = plans["70B on 4"]
    weights = 2 * (70_553_706_496 - 128_256 * 8192) / 4
    assert plan.roofline.decode(1024, 1).seconds == pytest.approx(weights / 3.35e12, rel=0.02)
    rows = 2 * 80 * (3 / 4) * 8192 * 8192 * 2  # bytes that a card receives: two all-reduces a layer
    computed = (2 * 8192 * 68.45e9 + 4 * 8192 * 80 * 8192 * 8193 / 2) / 4 / 989.4e12
    prefill = plan.roofline.prefill(8192, 8192)
    assert (prefill.limit, prefill.seconds) == ("compute", pytest.approx(computed, rel=0.02))
    assert rows / 450e9 < computed
    over_pcie = replace(get_target("h100"), link_bytes_per_s=64e9)
    narrow = Roofline(plan.model, over_pcie, 4, 16, plan.step).prefill(8192, 8192)
    assert (narrow.limit, narrow.seconds) == ("links", pytest.approx(rows / 32e9, rel=0.001))


def test_fp8_products_run_at_fp8_speed(plans: dict[str, Plan]) -> None:
    plan = plans["405B fp8"]
    products = 2 * 8192 * 401.6e9 / 8
    assert plan.time_to_first_token(8192).seconds >= products / 1978.9e12
    assert plan.time_to_first_token(8192).seconds < products / 989.4e12


def test_a_window_bounds_what_is_read() -> None:
    model = read_model("mistral-7b")
    step = StepBytes(weights=0, read_weights=0, block=2 * 32 * 16 * 8 * 128 * 2, state=0, temporaries=0, compile_s=0)
    windowed = replace(model, layer_windows=(4096,) * 32)
    bounds = [Roofline(shape, get_target("h200"), 1, 16, step).decode(32768, 1).seconds for shape in (model, windowed)]
    assert bounds[0] == pytest.approx(8 * bounds[1])
