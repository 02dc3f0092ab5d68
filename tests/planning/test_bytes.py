"""Every byte of a plan against arithmetic written out from the models' published shapes."""

from __future__ import annotations

import pytest

from jaxserve.planning.planner import Plan
from tests.planning.conftest import ASKED

VOCAB = 128_256
SHAPES = {  # layers, hidden, MLP, query heads; all have 8 KV heads of width 128
    "8B": (32, 4096, 14336, 32),
    "70B": (80, 8192, 28672, 64),
    "405B": (126, 16384, 53248, 128),
}
CARD_BYTES = {"a10g": 24e9, "h100": 85e9, "h200": 151e9}


def by_hand(name: str) -> dict[str, float]:
    """Per card."""
    asked = ASKED[name]
    layers, hidden, mlp, heads = SHAPES[name.split()[0]]
    cards, quantization = asked.get("ranks", 1), asked.get("quantization")
    width, kv_heads = 128, 8
    projections = layers * (hidden * (heads + 2 * kv_heads) * width + heads * width * hidden + 3 * hidden * mlp)
    outputs = layers * ((heads + 2 * kv_heads) * width + hidden + 2 * mlp + hidden)  # rows of those matrices
    of_projections = {
        None: 2.0 * projections,  # bfloat16
        "int4": 0.5 * projections + 2 * projections / 128,  # and a bfloat16 scale for each group of 128
        "fp8": 1.0 * projections + 4 * outputs,  # and a float32 scale for each row
    }[quantization]
    tables = 2 * 2 * VOCAB * hidden  # embedding and output head, split over the cards as the projections are
    norms = 2 * (2 * layers + 1) * hidden  # whole on every card
    kv_bytes = 1 if asked.get("kv_cache_dtype") == "int8" else 2
    return {
        "weights": (of_projections + tables) / cards + norms,
        "block": 2 * layers * 16 * kv_heads * width * kv_bytes / cards,
        # For 256 sequences and one more: was it in the prompt (1 byte), how often came it (2), its bias (4).
        "sampler": 257 * VOCAB * (1 + 2 + 4 + 1 / 8),
        "memory": CARD_BYTES[asked["target"]],
    }


@pytest.mark.parametrize("name", ASKED)
def test_bytes_are_those_of_hand_arithmetic(plans: dict[str, Plan], name: str) -> None:
    plan, hand = plans[name], by_hand(name)
    assert plan.step.weights == pytest.approx(hand["weights"], rel=0.02)
    assert plan.step.block == hand["block"]
    assert plan.step.state == pytest.approx(hand["sampler"], rel=0.001)
    room = 0.9 * hand["memory"] - hand["weights"] - hand["sampler"] - plan.step.temporaries
    most = 256 * 131_072 // 16 + 1  # more could never be in use
    blocks = min(room / hand["block"], most)
    assert plan.num_blocks == pytest.approx(blocks, rel=0.02)
    assert plan.cache_bytes == pytest.approx(blocks * hand["block"], rel=0.02)
    assert plan.num_tokens == pytest.approx(16 * blocks, rel=0.02)
    longest = min(16 * blocks, 131_072)
    assert plan.longest_context == pytest.approx(longest, rel=0.02)
    needed = (131_072 / 16 + 1) * hand["block"]
    assert plan.fits == (room >= needed)
    assert plan.missing_bytes == pytest.approx(max(needed - room, 0), rel=0.02)
    assert plan.largest_batch(4096) == pytest.approx(min(blocks // 256, 256), abs=1)


def test_what_fits(plans: dict[str, Plan]) -> None:
    """An A10G has 21.6 GB of use: 16.1 of weights leave no 17.2 for a context of 131,072; 5.7 leave no 17.2 either,
    but 8.6."""
    assert {name: plan.fits for name, plan in plans.items()} == {
        "8B bf16": False, "8B int4": False, "8B int4, int8 KV": True, "70B on 4": True, "70B on 2": True,
        "405B fp8": True}


@pytest.mark.parametrize("name", ASKED)
def test_temporaries_hold_what_a_step_cannot_do_without(plans: dict[str, Plan], name: str) -> None:
    """The largest step's gate and up projections and their product are live at once: 8,192 rows."""
    _, hidden, mlp, _ = SHAPES[name.split()[0]]
    least = 8192 * (2 * mlp + mlp) * 2 / ASKED[name].get("ranks", 1)
    assert least <= plans[name].step.temporaries < 3 * (least + 8192 * hidden * 4 * 4)
