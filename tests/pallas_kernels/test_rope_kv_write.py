"""rope_kv_write against float64: head norms, both pair layouts, partial rotation, and the cache that it writes.

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

from pallas_kernels.kv_write import triton as kv_triton
from pallas_kernels.paged_attention import paged_attention_decode
from pallas_kernels.rope_kv_write import rope_kv_write, rotate, split_and_rotate, triton
from tests.pallas_kernels.kv_write_oracle import E4M3, INT8, bits, poisoned, scale_of_tokens, stored

F32, BF16, F16 = (np.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
TOLERANCE = {F32: 1e-5, BF16: 1e-2, F16: 2e-3}
EPSILON = 1e-3  # large enough to be missed
interpreted = functools.partial(rope_kv_write, backend="triton_interpret")
both = pytest.mark.parametrize(
    "run", [functools.partial(rope_kv_write, backend="reference"), interpreted], ids=["reference", "triton"]
)


class Case:
    """Random projections on their way to random slots outside block 0 of a poisoned cache."""

    def __init__(self, num_tokens: int, heads: tuple[int, int, int] = (3, 4, 64), *, turns: int | None = None,
                 layout: str = "half", norm: bool = False, dtype: np.dtype = F32, cache: np.dtype | None = None,
                 scale: str | None = None, block_size: int = 16, num_blocks: int = 9):
        rng = np.random.default_rng()
        num_kv_heads, group, width = heads
        turns = turns or width
        self.block_size, self.layout = block_size, layout
        self.qkv = rng.normal(size=(num_tokens, num_kv_heads, group + 2, width)).astype(dtype)
        angles = rng.uniform(-100, 100, (num_tokens, turns // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        norms = rng.uniform(0.5, 2, (2, width)).astype(dtype)
        self.norms: list[Any] = list(norms) if norm else [None, None]
        self.before = poisoned(rng, (2, num_blocks, block_size, num_kv_heads, width), cache or dtype)
        slots = rng.permutation(np.arange(block_size, num_blocks * block_size))
        self.slots = slots[:num_tokens].astype(np.int32)
        shape = {None: None, "head": (num_kv_heads,), "block": (num_blocks, num_kv_heads)}[scale]
        self.scales = [None, None] if shape is None else list(rng.uniform(0.01, 0.04, (2, *shape)).astype(np.float32))

    def run(self, run: Callable[..., Any]) -> Any:
        (q_norm, k_norm), (k_scale, v_scale) = self.norms, self.scales
        run = functools.partial(run, epsilon=EPSILON, pair_layout=self.layout)
        return jax.jit(run)(self.qkv, self.cos, self.sin, *self.before, self.slots, q_norm=q_norm, k_norm=k_norm,
                            k_scale=k_scale, v_scale=v_scale)

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """q and k normed and rotated, in float64."""
        wide = self.qkv.astype(np.float64)
        return self._turned(wide[:, :, :-2], self.norms[0]), self._turned(wide[:, :, -2:-1], self.norms[1])[:, :, 0]

    def _turned(self, x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """As complex numbers: each pair times cos + i sin."""
        if weight is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight.astype(np.float64)
        num_pairs = self.cos.shape[1]
        lanes = np.arange(2 * num_pairs)
        first, second = lanes.reshape(2, -1) if self.layout == "half" else lanes.reshape(-1, 2).T
        turned = (x[..., first] + 1j * x[..., second]) * (self.cos + 1j * self.sin)[:, None, None]
        y = x.copy()
        y[..., first], y[..., second] = turned.real, turned.imag
        return y

    def check(self, run: Callable[..., Any]) -> None:
        q, new_k, new_v = (np.asarray(x) for x in self.run(run))
        want_q, want_k = self.exact()
        assert q.dtype == self.qkv.dtype
        check_close(q, want_q, TOLERANCE[self.qkv.dtype])
        scales = [scale_of_tokens(scale, self.slots, self.block_size) for scale in self.scales]
        self._check_untouched(new_k, new_v)
        k, v = (new.reshape(-1, *new.shape[2:])[self.slots] for new in (new_k, new_v))
        np.testing.assert_array_equal(bits(v), bits(stored(self.qkv[:, :, -1], v.dtype, scales[1])))
        if k.dtype in (INT8, E4M3):
            check_codes(k, stored(want_k, k.dtype, scales[0]))
        else:
            check_close(k, want_k, max(TOLERANCE[self.qkv.dtype], TOLERANCE[k.dtype]))

    def _check_untouched(self, *caches: np.ndarray) -> None:
        for old, new in zip(self.before, caches, strict=True):
            others = np.setdiff1d(np.arange(old.shape[0] * old.shape[1]), self.slots)
            before, after = (bits(cache.reshape(-1, *cache.shape[2:])[others]) for cache in (old, new))
            np.testing.assert_array_equal(before, after)


def check_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=tolerance * np.abs(want).max())


def check_codes(got: np.ndarray, want: np.ndarray) -> None:
    """Equal, but for the few numbers that float32 puts on the other side of a rounding boundary."""
    differ = bits(got) != bits(want)
    assert differ.mean() < 1e-3
    got, want = (np.where(differ, x.astype(np.float64), 0) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0.13, atol=1)  # one step


@both
@pytest.mark.parametrize(
    ("num_tokens", "turns", "layout", "norm"),
    [
        (1, 64, "half", True),
        (2, 32, "interleaved", False),
        (37, 64, "half", False),
        (37, 48, "half", True),
        (37, 64, "interleaved", True),
    ],
)
def test_norms_rotates_and_writes(run, num_tokens, turns, layout, norm):
    Case(num_tokens, turns=turns, layout=layout, norm=norm).check(run)


@both
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (F16, F16), (F32, BF16)], ids=str)
def test_dtypes(run, dtype, cache):
    Case(19, dtype=dtype, cache=cache, norm=True).check(run)


@both
@pytest.mark.parametrize(("cache", "scale"), [(INT8, "head"), (E4M3, None), (E4M3, "block")], ids=str)
def test_quantises(run, cache, scale):
    Case(37, cache=cache, scale=scale, norm=True).check(run)


@pytest.mark.parametrize(
    ("heads", "layout"),
    [
        ((2, 1, 64), "half"),
        ((1, 4, 80), "interleaved"),
        ((3, 6, 96), "half"),
        ((2, 7, 128), "interleaved"),
        ((1, 8, 256), "half"),
        ((2, 16, 64), "half"),
        ((8, 4, 128), "half"),
    ],
    ids=str,
)
def test_heads_and_widths(heads, layout):
    Case(3, heads, layout=layout, norm=True, dtype=BF16).check(interpreted)


@pytest.mark.parametrize(("num_tokens", "turns"), [(3, 64), (33, 80), (101, 40)])
def test_programs_of_several_tokens(monkeypatch, num_tokens, turns):
    """Token counts that no program divides."""
    monkeypatch.setattr(kv_triton, "_ENOUGH_PROGRAMS", 4)
    assert kv_triton.program_size(101, 3, 128)[0] == 8
    Case(num_tokens, (3, 1, 80), turns=turns, norm=True).check(interpreted)


@both
def test_padding_rows_share_a_slot_of_block_0(run):
    case = Case(6)
    case.slots[3:] = 0
    q, *after = (np.asarray(x) for x in case.run(run))
    check_close(q, case.exact()[0], 1e-5)
    for index in range(2):
        case.before[index, 0, 0] = after[index][0, 0]  # whichever came last
    case.qkv, case.cos, case.sin, case.slots = case.qkv[:3], case.cos[:3], case.sin[:3], case.slots[:3]
    case.check(lambda *_, **__: (q[:3], *after))


def _swapped_sign(keep: Any, *args: Any) -> Any:
    return keep(*args)._replace(sin=-keep(*args).sin)


def _wrong_pair(keep: Any, *args: Any) -> Any:
    return keep(*args)._replace(lane=args[2] ^ 2)


MUTATIONS: dict[str, tuple[str, Any]] = {
    "sign": ("_load_pairs", _swapped_sign),
    "pair": ("_load_pairs", _wrong_pair),
    "tail": ("program_tokens", lambda keep, *args: jnp.minimum(keep(*args), args[1] - 2)),
    "slot": ("store_rows", lambda keep, cache, rows, slot, *args: keep(cache, rows, slot ^ 1, *args)),
    "mean": ("_rms_scale", lambda keep, x, width, epsilon: keep(x, x.shape[-1], epsilon)),
    "epsilon": ("_rms_scale", lambda keep, x, width, epsilon: keep(x, width, 1e-6)),
    "weight": ("_scaled", lambda keep, x, scale, weight: keep(x, scale, jnp.ones_like(weight))),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_caught(monkeypatch, mutation):
    name, wrong = MUTATIONS[mutation]
    monkeypatch.setattr(triton, name, functools.partial(wrong, getattr(triton, name)))
    with pytest.raises(AssertionError):
        Case(37, (3, 2, 80), norm=True).check(interpreted)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_keeps_lengths_and_so_does_its_gradient(layout):
    case = Case(5, layout=layout)
    x, cos, sin = (jnp.asarray(array) for array in (case.qkv, case.cos, case.sin))
    gradient = jax.grad(lambda x: 0.5 * (rotate(x, cos, sin, layout) ** 2).sum())(x)
    np.testing.assert_allclose(gradient, x, atol=1e-5)


def test_split_and_rotate_is_the_part_before_the_cache():
    case = Case(7, norm=True)
    qkv, cos, sin, q_norm, k_norm = (jnp.asarray(array) for array in (case.qkv, case.cos, case.sin, *case.norms))
    q, k, v = split_and_rotate(qkv, cos, sin, q_norm=q_norm, k_norm=k_norm, epsilon=EPSILON)
    want_q, want_k = case.exact()
    check_close(np.asarray(q), want_q, 1e-5)
    check_close(np.asarray(k), want_k, 1e-5)
    np.testing.assert_array_equal(v, case.qkv[:, :, -1])


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_donated_caches_are_written_in_place(num_tokens):
    """Two layers of write and attention: the compiled program holds no copy of a cache."""
    num_blocks, heads, width = 1237, 3, 64

    def step(caches, qkv, cos, sin, slots, tables, lens):
        written = []
        for k_cache, v_cache in caches:
            q, k_cache, v_cache = rope_kv_write(qkv, cos, sin, k_cache, v_cache, slots)
            attended = paged_attention_decode(q, k_cache, v_cache, tables, lens, scale=1.0)
            qkv = qkv + jnp.pad(attended, ((0, 0), (0, 0), (0, 2), (0, 0)))
            written.append((k_cache, v_cache))
        return written, qkv

    cache = jax.ShapeDtypeStruct((num_blocks, 16, heads, width), jnp.float32)
    floats = [(num_tokens, heads, 6, width), (num_tokens, width // 2), (num_tokens, width // 2)]
    ints = [(num_tokens,), (num_tokens, 16), (num_tokens,)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats]
    args += [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints]
    compiled: Any = jax.jit(step, donate_argnums=0).lower([(cache, cache)] * 2, *args).compile()
    assert not re.findall(rf"= f32\[({num_blocks},16|{num_blocks * 16}),[^ ]* copy\(.*", compiled.as_text())
    cache_bytes = num_blocks * 16 * heads * width * 4
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": (4, 3, 8)}, "qkv "),
        ({"qkv": (4, 3, 2, 8)}, "qkv "),
        ({"cos": (4, 5)}, r"cos .*1 to 4"),
        ({"cos": (3, 4)}, "cos "),
        ({"sin": (4, 3)}, "sin "),
        ({"q_norm": (8,)}, "q_norm and k_norm"),
        ({"q_norm": (8,), "k_norm": (7,)}, "k_norm "),
        ({"k_cache": (9, 16, 2, 8)}, "k_cache"),
        ({"slot_mapping": (5,)}, "slot_mapping"),
        ({"pair_layout": "thirds"}, "pair_layout='thirds'"),
        ({"backend": "fast"}, "backend"),
    ],
)
def test_bad_input_is_named(change, message):
    shapes = {"qkv": (4, 3, 6, 8), "cos": (4, 4), "sin": (4, 4), "k_cache": (9, 16, 3, 8), "v_cache": (9, 16, 3, 8)}
    shapes |= {name: shape for name, shape in change.items() if isinstance(shape, tuple)}
    arguments: dict[str, Any] = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    arguments["slot_mapping"] = jnp.zeros(shapes.get("slot_mapping", (4,)), jnp.int32)
    arguments |= {name: value for name, value in change.items() if isinstance(value, str)}
    with pytest.raises(ValueError, match=message):
        rope_kv_write(**arguments)


def test_triton_needs_a_gpu():
    case = Case(4)
    with pytest.raises(NotImplementedError, match=r"rope_kv_write.*GPU"):
        rope_kv_write(*(jnp.asarray(x) for x in (case.qkv, case.cos, case.sin, *case.before, case.slots)),
                      backend="triton")
