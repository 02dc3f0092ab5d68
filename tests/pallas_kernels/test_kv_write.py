"""kv_write: the right values in the right slots, nothing else touched, and no copy of the cache.

Every property is checked of the reference and of the Triton kernel in Pallas' interpreter.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention_decode, paged_attention_ragged
from pallas_kernels.kv_write import kv_write, triton
from tests.pallas_kernels.kv_write_oracle import E4M3, E4M3_VALUES, INT8, bits, poisoned, scale_of_tokens, stored

F32, BF16, F16 = (np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
interpreted = functools.partial(kv_write, backend="triton_interpret")
both = pytest.mark.parametrize(
    "write", [functools.partial(kv_write, backend="reference"), interpreted], ids=["reference", "triton"]
)


class Case:
    """Random rows on their way to random slots outside block 0 of a poisoned cache."""

    def __init__(self, num_tokens: int, heads: tuple[int, int] = (3, 64), *, rows: np.dtype = F32,
                 cache: np.dtype = F32, scale: str | None = None, block_size: int = 16, num_blocks: int = 9):
        rng = np.random.default_rng()
        self.block_size = block_size
        self.rows = rng.normal(size=(2, num_tokens, *heads)).astype(rows)
        self.before = poisoned(rng, (2, num_blocks, block_size, *heads), cache)
        slots = rng.permutation(np.arange(block_size, num_blocks * block_size))
        self.slots = slots[:num_tokens].astype(np.int32)
        shape = {None: None, "head": heads[:1], "block": (num_blocks, heads[0])}[scale]
        self.scales = [None, None] if shape is None else list(rng.uniform(0.003, 0.02, (2, *shape)).astype(np.float32))

    def run(self, write: Callable[..., Any]) -> Any:
        # A function of this run alone: jit remembers what it has traced, and would not see what a test breaks.
        run = functools.partial(write, k_scale=self.scales[0], v_scale=self.scales[1])
        return jax.jit(run)(*self.rows, *self.before, self.slots)

    def check(self, write: Callable[..., Any]) -> None:
        for rows, old, new, scale in zip(self.rows, self.before, self.run(write), self.scales, strict=True):
            want = old.reshape(-1, *old.shape[2:]).copy()
            want[self.slots] = stored(rows, old.dtype, scale_of_tokens(scale, self.slots, self.block_size))
            np.testing.assert_array_equal(bits(new), bits(want.reshape(old.shape)))


@both
@pytest.mark.parametrize(("num_tokens", "cache"), [(1, F32), (2, BF16), (37, F32), (37, F16)], ids=str)
def test_writes_its_slots_only(write, num_tokens, cache):
    Case(num_tokens, cache=cache).check(write)


@both
@pytest.mark.parametrize(
    ("rows", "cache", "scale"),
    [(BF16, INT8, "head"), (F32, INT8, "block"), (F16, E4M3, None), (BF16, E4M3, "head"), (F32, E4M3, "block")],
    ids=str,
)
def test_quantises(write, rows, cache, scale):
    Case(37, rows=rows, cache=cache, scale=scale).check(write)


@pytest.mark.parametrize(
    ("num_tokens", "heads"), [(3, (5, 80)), (33, (1, 64)), (33, (2, 96)), (101, (8, 128)), (101, (1, 256))], ids=str
)
def test_programs_of_several_tokens(monkeypatch, num_tokens, heads):
    """Token counts that no program divides, widths that are no power of two."""
    monkeypatch.setattr(triton, "_ENOUGH_PROGRAMS", 4)
    monkeypatch.setattr(triton, "_PROGRAM_ELEMENTS", 2048)
    assert triton.program_size(101, 8, 128)[0] == 16
    Case(num_tokens, heads, rows=BF16, cache=BF16).check(interpreted)


@pytest.mark.parametrize("block_size", [1, 48])
def test_block_sizes(block_size):
    Case(20, cache=E4M3, scale="block", block_size=block_size, num_blocks=25).check(interpreted)


@both
def test_saturates(write):
    case = Case(4, (1, 8), cache=INT8, scale="head")
    edges = np.array([-1e30, -128.5, -127.5, -0.5, 0.5, 1.5, 126.5, 1e30], np.float32)
    case.scales = [np.ones(1, np.float32)] * 2
    case.rows = np.broadcast_to(edges, case.rows.shape)
    case.check(write)


@both
def test_rounds_to_float8_at_every_boundary(write):
    """Every number of the format, every midpoint, their neighbours in float32, both signs, infinities, NaN."""
    middles = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2
    x = np.concatenate([E4M3_VALUES, middles]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.array([464.0, 465.0, 1e30, np.inf, -np.inf, np.nan, 1e-12, -1e-12], np.float32)])
    x = np.pad(x, (0, -x.size % 64)).reshape(-1, 1, 64)
    case = Case(len(x), (1, 64), cache=E4M3)
    case.rows = np.stack([x, x[::-1]])
    case.check(write)


@both
def test_padding_rows_share_a_slot_of_block_0(write):
    case = Case(6)
    case.slots[3:] = 0
    after = case.run(write)
    case.rows, case.slots = case.rows[:, :3], case.slots[:3]
    for index in range(2):
        case.before[index, 0, 0] = after[index][0, 0]  # whichever came last
    case.check(lambda *_, **__: after)


MUTATIONS: dict[str, tuple[str, Any]] = {
    "tail": ("program_tokens", lambda keep, *args: jnp.minimum(keep(*args), args[1] - 2)),
    "slot": ("store_rows", lambda keep, cache, rows, slot, *args: keep(cache, rows, slot ^ 1, *args)),
    "head": ("store_rows", lambda keep, cache, rows, slot, head, *args: keep(cache, rows, slot, 2 - head, *args)),
    "lanes": ("lane_mask", lambda keep, lane, width: keep(lane, width - 1)),
    "rounding": ("_round_to_int", lambda keep, x, step: (x / step).astype(jnp.int32)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_caught(monkeypatch, mutation):
    name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(triton, name, functools.partial(wrong, getattr(triton, name)))
    with pytest.raises(AssertionError):
        Case(37, (3, 80), cache=INT8, scale="head").check(interpreted)


@pytest.mark.parametrize(("num_tokens", "ragged"), [(1, False), (48, True)])
def test_donated_caches_are_written_in_place(num_tokens, ragged):
    """Two layers of write and attention: the compiled program holds no copy of a cache."""
    num_blocks, num_seqs = 1237, min(num_tokens, 8)

    def step(caches, q, tables, lens, slots):
        written = []
        for k_cache, v_cache in caches:
            k_cache, v_cache = kv_write(q[:, :, 0], q[:, :, 1], k_cache, v_cache, slots)
            if ragged:
                counts = [lens[0], lens, lens, lens[1]]
                q = q + paged_attention_ragged(q, k_cache, v_cache, tables, lens, lens, lens, *counts, scale=1.0)
            else:
                q = q + paged_attention_decode(q, k_cache, v_cache, tables, lens, scale=1.0)
            written.append((k_cache, v_cache))
        return written, q

    cache = jax.ShapeDtypeStruct((num_blocks, 16, 3, 64), jnp.float32)
    q = jax.ShapeDtypeStruct((num_tokens, 3, 3, 64), jnp.float32)
    shapes = ((num_seqs, 16), (num_seqs,), (num_tokens,))
    tables, lens, slots = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    compiled: Any = jax.jit(step, donate_argnums=0).lower([(cache, cache)] * 2, q, tables, lens, slots).compile()
    sizes = f"({num_blocks},16|{num_blocks * 16}),"
    assert not re.findall(rf"= f32\[{sizes}[^ ]* copy\(.*", compiled.as_text())
    memory = compiled.memory_analysis()
    cache_bytes = num_blocks * 16 * 3 * 64 * 4
    assert memory.alias_size_in_bytes >= 4 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


SHAPES = {"k": (4, 3, 8), "v": (4, 3, 8), "k_cache": (9, 16, 3, 8), "v_cache": (9, 16, 3, 8)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": (4, 3, 7)}, "v "),
        ({"k_cache": (9, 16, 2, 8)}, "k_cache"),
        ({"v_cache": (8, 16, 3, 8)}, "v_cache"),
        ({"slot_mapping": (5,)}, "slot_mapping"),
        ({"k_scale": (3,), "v_scale": (3,)}, "k_scale.*not quantised"),
    ],
)
def test_bad_input_is_named(change, message):
    arrays: dict[str, Any] = {name: jnp.zeros(change.get(name, shape)) for name, shape in (SHAPES | change).items()}
    arrays["slot_mapping"] = jnp.zeros(change.get("slot_mapping", (4,)), jnp.int32)
    with pytest.raises(ValueError, match=message):
        kv_write(**arrays)


@pytest.mark.parametrize(
    ("dtype", "k_scale", "v_scale", "message"),
    [
        (jnp.int8, None, None, "k_scale=None"),
        (jnp.int8, (2,), (2,), r"k_scale \(2,\)"),
        (jnp.float8_e4m3fn, (3,), None, "both or neither"),
        (jnp.float8_e4m3fn, (3,), (9, 3), r"v_scale \(9, 3\)"),
        (jnp.int32, None, None, "k_cache int32"),
    ],
)
def test_scales_must_fit_the_cache(dtype, k_scale, v_scale, message):
    rows, cache = jnp.zeros(SHAPES["k"]), jnp.zeros(SHAPES["k_cache"], dtype)
    scales: dict[str, Any] = {"k_scale": k_scale and jnp.ones(k_scale), "v_scale": v_scale and jnp.ones(v_scale)}
    with pytest.raises(ValueError, match=message):
        kv_write(rows, rows, cache, cache, jnp.zeros(4, jnp.int32), **scales)


def test_triton_needs_a_gpu():
    rows, cache = jnp.zeros(SHAPES["k"]), jnp.zeros(SHAPES["k_cache"])
    with pytest.raises(NotImplementedError, match=r"kv_write.*GPU"):
        kv_write(rows, rows, cache, cache, jnp.zeros(4, jnp.int32), backend="triton")


def test_refuses_what_wraps():
    """From 2^31 one-byte elements on, until Pallas turns to offsets of 64 bits above 2^32 bytes."""
    def refusal(num_blocks: int, dtype: Any) -> str | None:
        return triton.refusal(jax.ShapeDtypeStruct((num_blocks, 16, 8, 128), dtype))  # type: ignore[arg-type]

    assert refusal(2**17, jnp.int8) is None
    assert "wrap" in (refusal(2**17 + 1, jnp.float8_e4m3fn) or "")
    assert refusal(2**17 + 1, jnp.bfloat16) is None
    assert refusal(2**18 + 1, jnp.int8) is None
