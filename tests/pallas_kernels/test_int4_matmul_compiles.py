"""int4_matmul compiled for every generation of cards: one kernel and the sum of its splits, no spills."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import get_target
from pallas_kernels.int4_matmul import Int4Weight, int4_matmul, triton
from pallas_kernels.int4_matmul.layout import WORDS
from pallas_kernels.int4_matmul.triton import Tiles
from tests.pallas_kernels.compiling import ARCHITECTURES, assert_no_spills, compile_kernel
from tests.pallas_kernels.covering import covering, grid

AXES: dict[str, Any] = {
    "target_name": list(ARCHITECTURES.values()),
    "num_tokens": [1, 16, 31, 500, 512],  # one or two for each row of the tuning table
    "group": [32, 64, 128, 0],
    "has_zeros": [False, True],
    "has_bias": [False, True],
    "dtype": ["bfloat16", "float16"],
    "shape": [(4096, 4096), (1216, 1000)],  # the latter fills neither the last block nor the last tile
}


def compiled(
    target_name: str,
    num_tokens: int,
    group: int,
    has_zeros: bool,
    has_bias: bool,
    dtype: str,
    shape: tuple[int, int],
) -> Any:
    num_features, num_outputs = shape
    num_blocks = -(-num_features // 128)
    num_groups = num_blocks * 128 // group if group else 1
    weight = Int4Weight(
        jax.ShapeDtypeStruct((num_blocks, num_outputs, WORDS), jnp.int32),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((num_groups, num_outputs), jnp.float16),  # type: ignore[arg-type]
        jax.ShapeDtypeStruct((num_groups, num_outputs), jnp.int8) if has_zeros else None,  # type: ignore[arg-type]
    )
    x = jax.ShapeDtypeStruct((num_tokens, num_features), dtype)
    bias = jax.ShapeDtypeStruct((num_outputs,), dtype) if has_bias else None
    run = partial(int4_matmul, device=get_target(target_name).mesh().devices.flat[0])
    return compile_kernel(run, x, weight, bias, target_name=target_name)


def name(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def check(record: Any, **case: Any) -> None:
    program = compiled(**case)
    names = [kernel.name for kernel in program.kernels]
    assert names[0] == "int4_matmul"
    assert len(names) <= 2
    assert_no_spills(program, record)


@pytest.mark.parametrize("case", covering(AXES), ids=name)
def test_covering_set(case, record_property):
    check(record_property, **case)


@pytest.mark.slow
@pytest.mark.parametrize("case", grid(AXES, list(AXES)), ids=name)
def test_whole_grid(case, record_property):
    check(record_property, **case)


PLAIN: dict[str, Any] = dict(group=128, has_zeros=True, has_bias=False, dtype="bfloat16", shape=(4096, 4096))


def stores_between_products(target_name: str, num_tokens: int) -> int:
    """How often weights take the way through shared memory to the matrix unit, and wait at a barrier for it."""
    ((_, ptx),) = compiled(target_name=target_name, num_tokens=num_tokens, **PLAIN).ptx
    product = {"a100": "mma.sync", "h200": "wgmma.mma_async"}[target_name]
    return ptx[ptx.index(product) : ptx.rindex(product)].count("st.shared")


@pytest.mark.parametrize("target_name", ["a100", "h200"])
def test_weights_stay_in_registers(monkeypatch, target_name):
    assert [stores_between_products(target_name, num_tokens) for num_tokens in (1, 31, 200)] == [0, 0, 0]
    narrow = Tiles(16, 64, num_warps=4, num_stages=4, scale_after_dot=True, programs_per_core=2)  # 16 outputs a warp
    monkeypatch.setattr(triton, "tiles_for", lambda *_: narrow)
    assert stores_between_products(target_name, 1) > 0


def test_very_many_tokens_take_a_plain_matmul():
    program = compiled(target_name="h200", num_tokens=1024, **PLAIN)
    assert not program.pallas_kernels
    # Weights in bfloat16, x in the order of their features, and cuBLAS' workspace: nothing in float32.
    assert program.memory.temp_bytes < 2 * 4096 * 4096 + 2 * 1024 * 4096 + 2**23
