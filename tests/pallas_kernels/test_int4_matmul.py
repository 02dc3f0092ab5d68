"""int4_matmul against float64: every group size, odd sizes, and what is broken on purpose.

Pallas' interpreter hands kernels outputs full of NaN: what a kernel does not write, these tests see.
"""

import secrets
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Target
from pallas_kernels.int4_matmul import Int4Weight, from_nibbles, int4_matmul, layout, reference, triton
from pallas_kernels.int4_matmul.triton import Tiles, num_splits_for, tiled_matmul, tiles_for
from pallas_kernels.int4_matmul.unpack import unpack

H200 = Target("gpu", (9, 0), 132)
RUN = jax.jit(partial(tiled_matmul, interpret=True), static_argnames=("tiles", "num_splits"))
MATMUL = jax.jit(int4_matmul)
SMALL = Tiles(tokens=16, outputs=32, num_warps=1, num_stages=2, scale_after_dot=True, programs_per_core=1)


@dataclass
class Case:
    """A random product. group: of input features, 0 for one group of all."""

    num_tokens: int
    num_features: int
    num_outputs: int
    group: int
    has_zeros: bool = False
    has_bias: bool = False
    dtype: Any = jnp.float32
    scale_dtype: Any = jnp.float32

    def __str__(self) -> str:
        sizes = f"{self.num_tokens}x{self.num_features}x{self.num_outputs}-group{self.group or 'all'}"
        return f"{sizes}{'-zeros' * self.has_zeros}{'-bias' * self.has_bias}-{np.dtype(self.dtype).name}"

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(32)
        rng = np.random.default_rng(self.seed)
        group = self.group or self.num_features
        shape = (-(-self.num_features // group), self.num_outputs)
        nibbles = rng.integers(0, 16, (self.num_features, self.num_outputs)).astype(np.uint8)
        scales = rng.uniform(0.01, 0.1, shape).astype(self.scale_dtype)
        zeros = rng.integers(0, 17, shape) if self.has_zeros else None
        self.x = jnp.asarray(rng.normal(size=(self.num_tokens, self.num_features)), self.dtype)
        self.bias = jnp.asarray(rng.normal(size=self.num_outputs), self.dtype) if self.has_bias else None
        self.weight: Int4Weight = jax.tree.map(jnp.asarray, from_nibbles(nibbles, scales, zeros))
        zero_of, scale_of = (
            np.repeat(np.broadcast_to(rows, shape), group, axis=0)[: self.num_features]
            for rows in (8 if zeros is None else zeros, scales.astype(np.float64))
        )
        self.want = np.asarray(self.x, np.float64) @ ((nibbles - zero_of) * scale_of)
        if self.bias is not None:
            self.want += np.asarray(self.bias, np.float64)

    def check(self, out: jax.Array) -> None:
        assert out.dtype == self.dtype
        error = np.abs(np.asarray(out, np.float64) - self.want).max() / np.abs(self.want).max()
        assert error < (1e-5 if self.dtype == jnp.float32 else 1e-2), f"seed {self.seed}"  # NaN is not

    def kernel(self, tiles: Tiles, num_splits: int, run: Any = RUN) -> jax.Array:
        return run(self.x, self.weight, self.bias, tiles=tiles, num_splits=num_splits)


BFLOAT16 = dict(dtype=jnp.bfloat16, scale_dtype=jnp.float16)
CASES = [
    (Case(1, 256, 64, 128), SMALL, 2),
    (Case(3, 384, 70, 64, True, True), SMALL, 3),
    (Case(17, 320, 33, 32, True), replace(SMALL, scale_after_dot=False), 1),
    (Case(130, 128, 33, 0, True, True), replace(SMALL, tokens=64, scale_after_dot=False), 1),
    (Case(5, 600, 64, 0, True), SMALL, 4),  # 5 blocks in 4 splits; features and groups that the last block lacks
    (Case(3, 576, 64, 128, True, True, **BFLOAT16), SMALL, 2),
    (Case(130, 256, 70, 128, True, True, **BFLOAT16), replace(SMALL, tokens=32, scale_after_dot=False), 2),
    (Case(17, 256, 40, 32, dtype=jnp.float16, scale_dtype=jnp.bfloat16), SMALL, 2),
]


@pytest.mark.parametrize(("case", "tiles", "num_splits"), CASES, ids=[str(case) for case, *_ in CASES])
def test_kernel(case, tiles, num_splits):
    case.check(case.kernel(tiles, num_splits))


@pytest.mark.parametrize("case", [case for case, *_ in CASES], ids=str)
def test_reference(case):
    case.check(MATMUL(case.x, case.weight, case.bias))


@pytest.mark.parametrize("case", [*(CASES[i][0] for i in (2, 3, 4)), replace(CASES[5][0], has_bias=False)], ids=str)
def test_dense(case):
    """The way of very many tokens. Bias only in float32: it is added to rounded sums, one more rounding in 16 bits."""
    case.check(jax.jit(reference.int4_matmul_dense)(case.x, case.weight, case.bias))


def test_tuned_tiles():
    case = Case(1, 256, 140, 128, has_zeros=True, dtype=jnp.bfloat16)
    case.check(int4_matmul(case.x, case.weight, backend="triton_interpret"))


def test_same_in_every_split():
    """Splits of the input features change nothing but the order of float32 sums."""
    case, tiles, _ = CASES[4]
    for num_splits in (1, 5):
        case.check(case.kernel(tiles, num_splits))


# What is broken on purpose: each must be seen by the check that passes unbroken.


def wrong_nibble_order(weight):
    """As if the two weights of a word were the other way round."""
    packed = np.asarray(weight.packed).view(np.uint32)
    return weight._replace(packed=(packed >> 16 | packed << 16).view(np.int32))


def wrong_slab_order(weight):
    packed = np.asarray(weight.packed).view(np.uint32)
    return weight._replace(packed=((packed & 0x0F0F0F0F) << 4 | packed >> 4 & 0x0F0F0F0F).view(np.int32))


def missing_zero_points(weight):
    return weight._replace(zeros=None)


def scales_of_the_group_before(weight):
    return weight._replace(scales=jnp.roll(weight.scales, 1, axis=0))


def one_scale_for_all_groups(weight):
    return weight._replace(scales=jnp.broadcast_to(weight.scales[:1], weight.scales.shape))


BREAKS = [wrong_nibble_order, wrong_slab_order, missing_zero_points, scales_of_the_group_before,
          one_scale_for_all_groups]  # fmt: skip


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_broken_weights_are_seen(break_it):
    case = Case(3, 384, 70, 64, True, True)
    case.weight = break_it(case.weight)
    with pytest.raises(AssertionError):
        case.check(case.kernel(SMALL, 3))


def test_dropped_tail_tile_is_seen(monkeypatch):
    monkeypatch.setattr(triton.pl, "cdiv", lambda a, b: max(a // b, 1))
    case = CASES[1][0]
    with pytest.raises(AssertionError):
        case.check(case.kernel(SMALL, 3, run=partial(tiled_matmul, interpret=True)))


def test_cut_outputs():
    case = Case(3, 384, 70, 64, True, True)
    assert case.bias is not None
    part = jax.tree.map(lambda array: array[:, 7:19], case.weight)
    case.want = case.want[:, 7:19]
    case.check(MATMUL(case.x, part, case.bias[7:19]))


@pytest.mark.parametrize("group", [32, 0])
def test_cut_input_features(group):
    """Two shards of 288 features, each padded to 384: their products add up."""
    rng = np.random.default_rng()
    shape = (576 // group, 24) if group else (1, 24)
    nibbles = rng.integers(0, 16, (576, 24)).astype(np.uint8)
    scales, zeros = rng.uniform(0.01, 0.1, shape).astype(np.float32), rng.integers(0, 16, shape)
    x = rng.normal(size=(4, 576)).astype(np.float32)
    whole = MATMUL(x, from_nibbles(nibbles, scales, zeros))
    weight = from_nibbles(nibbles, scales, zeros, num_in_shards=2)
    shards = [
        jax.tree.map(lambda array: array if len(array) == 1 else np.split(array, 2)[shard], weight)  # noqa: B023
        for shard in range(2)
    ]
    parts = [MATMUL(part, shard) for part, shard in zip(np.split(x, 2, axis=1), shards, strict=True)]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=0, atol=1e-5 * np.abs(whole).max())


# Numbers that the matrix unit gets are made by PTX, which nothing here can run: this runs the three instructions.


def run_ptx(text: str, dtype: Any, *arguments: Any) -> Any:
    """What `text` leaves in $0, given uint32 arrays in $1, $2, ..."""
    values: dict[str, Any] = {f"${number}": value for number, value in enumerate(arguments, 1)}

    def value_of(operand: str) -> Any:
        return values[operand] if operand in values else np.uint32(int(operand, 16))

    def floats(operand: str) -> Any:
        return np.ascontiguousarray(np.broadcast_to(value_of(operand), arguments[0].shape)).view(dtype)

    for line in text.strip("{} ").split(";")[1:-1]:
        operation, operands = line.split(maxsplit=1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        if operation == "mov.b32":
            values[target] = value_of(sources[0])
        elif operation == "lop3.b32":
            a, b, c = (value_of(source) for source in sources[:3])
            table = int(sources[3], 16)
            terms = [
                (a if bits & 4 else ~a) & (b if bits & 2 else ~b) & (c if bits & 1 else ~c)
                for bits in range(8)
                if table >> bits & 1
            ]
            values[target] = np.bitwise_or.reduce(terms)
        else:
            assert operation == {"bfloat16": "fma.rn.bf16x2", "float16": "fma.rn.f16x2"}[np.dtype(dtype).name]
            a, b, c = (floats(source).astype(np.float64) for source in sources)
            values[target] = (a * b + c).astype(dtype).view(np.uint32)
    return floats("$0")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_scale", [False, True])
def test_ptx_of_unpacking(monkeypatch, dtype, has_zeros, has_scale):
    """All nibbles and zero-points; operands as the kernel hands them over."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 17 * 64, dtype=np.uint32).reshape(17, 64)
    zeros = np.arange(17, dtype=np.int8) if has_zeros else None
    scale = rng.uniform(0.01, 0.1, 17).astype(np.float16) if has_scale else None

    def run(text: str, *, args: Any, constraints: str, pack: int, result_shape_dtypes: Any) -> Any:
        assert (constraints.count("r"), pack) == (1 + len(args), 1)
        return [jnp.asarray(run_ptx(text, dtype, *(np.asarray(arg).view(np.uint32) for arg in args)).view(np.int32))]

    monkeypatch.setattr(plt, "elementwise_inline_asm", run)
    given: dict[str, Any] = dict(words=words.view(np.int32), zeros=zeros, scale=scale)
    run_unpack = partial(unpack, **jax.tree.map(jnp.asarray, given), dtype=jnp.dtype(dtype))
    got, interpreted = (np.asarray(run_unpack(interpret=interpret)) for interpret in (False, True))
    nibbles = np.stack([words & 15, words >> 16 & 15], axis=-1).reshape(17, -1).astype(np.int32)
    want = (nibbles - (8 if zeros is None else zeros[:, None].astype(np.int32))).astype(np.float64)
    if scale is not None:
        want = want * scale.astype(dtype).astype(np.float64)[:, None]
    np.testing.assert_array_equal(got, want.astype(dtype))
    np.testing.assert_array_equal(interpreted, got)


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16, 17, 32, 33, 64, 128, 129, 512])
def test_a_card_is_filled(num_tokens):
    """A matrix of 4096 by 4096 gives an H200 a program a core, or for every second one where the sums of more splits
    would weigh too much against the weights; and no program less than a block."""
    tiles = tiles_for(num_tokens, H200)
    assert tiles is not None
    packed = jax.ShapeDtypeStruct((32, 4096, layout.WORDS), jnp.int32)
    num_tiles = -(-num_tokens // tiles.tokens) * (4096 // tiles.outputs)
    num_splits = num_splits_for(tiles, num_tokens, packed, H200)
    assert (0.45 if 16 < num_tokens < 512 else 0.9) * H200.num_cores < num_tiles * num_splits
    sums_bytes, weight_bytes = num_splits * num_tokens * 4096 * 4 * 2, 4096 * 4096 // 2
    assert num_splits == 1 or num_tokens > 32 or sums_bytes <= weight_bytes / 4
    assert num_splits <= 32
    assert num_splits_for(tiles, num_tokens, jax.ShapeDtypeStruct((1, 32, layout.WORDS), jnp.int32), H200) == 1


def test_many_tokens_go_the_dense_way():
    assert tiles_for(513, H200) is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": jnp.zeros((3, 384))}, "x "),
    ({"x": jnp.zeros((3, 256), jnp.int32)}, "x .*int32"),
    ({"packed": jnp.zeros((2, 24, 8), jnp.int32)}, "packed"),
    ({"packed": jnp.zeros((2, 24, 16), jnp.uint32)}, "packed.*uint32"),
    ({"scales": jnp.zeros((2, 23))}, "scales"),
    ({"scales": jnp.zeros((3, 24))}, "scales.*groups"),
    ({"zeros": jnp.zeros((2, 24), jnp.int32)}, "zeros.*int32"),
    ({"bias": jnp.zeros(23)}, "bias"),
    ({"backend": "fast"}, "backend"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_named(change, message):
    good = {"x": jnp.zeros((3, 256)), "packed": jnp.zeros((2, 24, 16), jnp.int32), "scales": jnp.zeros((2, 24))}
    given: dict[str, Any] = {"zeros": None, "bias": None, "backend": None, **good, **change}
    weight = Int4Weight(given["packed"], given["scales"], given["zeros"])
    with pytest.raises(ValueError, match=message):
        int4_matmul(given["x"], weight, given["bias"], backend=given["backend"])


def test_triton_needs_a_gpu():
    case = CASES[0][0]
    with pytest.raises(NotImplementedError, match="triton"):
        int4_matmul(case.x, case.weight, backend="triton")
