"""The Mosaic attention kernels compiled for Hopper: how many launches, no spills, shared memory that the card has."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import CompiledProgram, get_target
from pallas_kernels.dispatch import Target
from pallas_kernels.paged_attention import mosaic_decode, mosaic_ragged
from pallas_kernels.paged_attention.triton_tiles import Cache
from tests.pallas_kernels.compiling import assert_no_spills, compile_kernel
from tests.pallas_kernels.covering import covering

HOPPER = Target("gpu", (9, 0), 132)
NUM_SEQS, NUM_KV_HEADS = 24, 2

DECODE_AXES: dict[str, Any] = {
    "target_name": ["h100", "h200"],
    "width": [64, 128, 256],
    "group_heads": [1, 4, 6, 7, 8, 16],
    "dtype": ["bfloat16", "float16"],
    "block_size": [16, 32],
    "num_splits": [1, 4],
    "window": [None, 4096],
    "soft_cap": [None, 50.0],
}
RAGGED_AXES = {**DECODE_AXES, "width": [64, 128], "num_splits": [1]}
FEW_GROUPS = {"group_heads": [1, 7, 16]}


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def arrays(num_rows: int, width: int, group_heads: int, dtype: str, block_size: int) -> tuple[Any, ...]:
    cache = jax.ShapeDtypeStruct((300, block_size, NUM_KV_HEADS, width), dtype)
    q = jax.ShapeDtypeStruct((num_rows, NUM_KV_HEADS, group_heads, width), dtype)
    return q, Cache(cache, cache, None, None), int32(NUM_SEQS, 8192 // block_size)


def compile_decode(target_name: str, num_splits: int, window: int | None, soft_cap: float | None,
                   **shapes: Any) -> CompiledProgram:
    def run(*args: Any) -> jax.Array:
        options: Any = dict(window=window, soft_cap=soft_cap, num_splits=num_splits, target=HOPPER)
        return mosaic_decode.decode(*args, scale=0.1, **options)

    return compile_kernel(run, *arrays(NUM_SEQS, **shapes), int32(NUM_SEQS), target_name=target_name)


def compile_ragged(target_name: str, num_splits: int, window: int | None, soft_cap: float | None,
                   **shapes: Any) -> CompiledProgram:
    def run(*args: Any) -> jax.Array:
        options: Any = dict(window=window, soft_cap=soft_cap, num_splits=num_splits, target=HOPPER)
        return mosaic_ragged.ragged(*args, scale=0.1, **options)

    rows = [int32(NUM_SEQS)] * 3 + [int32()]
    tiles = [int32(32), int32(32), int32()]
    return compile_kernel(run, *arrays(256, **shapes), *rows, *tiles, target_name=target_name)


def check(program: CompiledProgram, record: Any) -> None:
    assert_no_spills(program, record)
    for kernel in program.pallas_kernels:
        assert (kernel.shared_memory_bytes or 0) <= get_target(program.target.name).shared_memory_per_block_bytes


def name(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def covering_sets(axes: dict[str, Any]) -> list[Any]:
    """Cases of a small covering set, then, marked slow, those of one with all groups of heads."""
    few, all_of_them = covering({**axes, **FEW_GROUPS}), covering(axes)
    cases = [pytest.param(case, id=name(case)) for case in few]
    more = [case for case in all_of_them if case not in few]
    return cases + [pytest.param(case, id=name(case), marks=pytest.mark.slow) for case in more]


@pytest.mark.parametrize("case", covering_sets(DECODE_AXES))
def test_decode(case, record_property):
    program = compile_decode(**case)
    check(program, record_property)
    expected = ["paged_attention_decode"] + ["paged_attention_combine"] * (case["num_splits"] > 1)
    assert [kernel.name for kernel in program.kernels] == expected


@pytest.mark.parametrize("case", covering_sets(RAGGED_AXES))
def test_ragged(case, monkeypatch, record_property):
    """Without the decode kernel, which has its own test."""
    monkeypatch.setattr(mosaic_ragged, "decode", lambda q, *args, **options: jnp.zeros_like(q[:NUM_SEQS]))
    program = compile_ragged(**case)
    check(program, record_property)
    assert [kernel.name for kernel in program.pallas_kernels] == ["paged_attention_ragged"]


def test_ragged_with_its_decodes(record_property):
    case = covering(RAGGED_AXES)[0]
    program = compile_ragged(**case)
    check(program, record_property)
    assert {kernel.name for kernel in program.pallas_kernels} == {"paged_attention_decode", "paged_attention_ragged"}
