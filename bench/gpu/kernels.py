"""The kernels on the machine's own device: right by the reference, and how near to the memory's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QUERY_TILE, kv_write, paged_attention_decode, paged_attention_ragged
from pallas_kernels.int4_matmul.api import int4_matmul
from pallas_kernels.int4_matmul.layout import BLOCK, WORDS, Int4Weight
from pallas_kernels.rope_kv_write import rope_kv_write

BLOCK_SIZE = 16
LIMIT = 1e-2
"""Largest error, relative to the largest value of the reference, with bfloat16 inputs."""


@dataclass(frozen=True)
class Comparison:
    name: str
    error: float

    @property
    def is_right(self) -> bool:
        return self.error <= LIMIT


@dataclass(frozen=True)
class Speed:
    """num_bytes: what the kernel has to read, weights or live KV."""

    name: str
    seconds: float
    num_bytes: int


HEADS = ((7, 80), (4, 128), (1, 64), (8, 256))
"""(G, H) to compare."""
CACHES = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
PRODUCTS = ((17, (1024, 256), 32), (1, (512, 384), 128), (300, (256, 640), 64))
"""(T, (inputs, outputs), group size) to compare."""


def compare_all(backend: str, *, only_first: bool = False) -> list[Comparison]:
    """Every kernel against the reference on the same random values; "mosaic" has attention only, in some shapes.

    Args:
      only_first: of the head shapes and products.
    """
    if backend == "mosaic":
        return _compare_mosaic()
    rng = np.random.default_rng()
    found = []
    for group, width in HEADS[:1] if only_first else HEADS:
        for cache_dtype in CACHES:
            name = f"G={group} H={width} KV {jnp.dtype(cache_dtype).name}"
            arrays = _attention_arrays(rng, [1, 17, 400, 1030], 2, group, width, cache_dtype)
            scales = dict(zip(("k_scale", "v_scale"), arrays.pop("scales"), strict=True))
            found.append(_compare(f"decode {name}", partial(paged_attention_decode, scale=width**-0.5, **scales),
                                  tuple(arrays.values()), backend))
            found.append(_compare(f"mixed {name}", partial(paged_attention_ragged, scale=width**-0.5, **scales),
                                  _ragged_arrays(rng, arrays), backend))
            found.append(_compare(f"rope_kv_write {name}", partial(rope_kv_write, **scales),
                                  _qkv_arrays(rng, arrays, group), backend))
            k, v = (jnp.asarray(rng.standard_normal((5, 2, width)), jnp.bfloat16) for _ in range(2))
            slots = jnp.asarray(rng.permutation(64)[:5], jnp.int32)
            found.append(_compare(f"kv_write {name}", partial(kv_write, **scales),
                                  (k, v, arrays["k_cache"], arrays["v_cache"], slots), backend))
    for num_tokens, (num_in, num_out), group_size in PRODUCTS[:1] if only_first else PRODUCTS:
        x = jnp.asarray(rng.standard_normal((num_tokens, num_in)), jnp.bfloat16)
        found.append(_compare(f"int4_matmul T={num_tokens} group {group_size}", int4_matmul,
                              (x, random_int4(rng, num_in, num_out, group_size)), backend))
    return found


def _compare_mosaic() -> list[Comparison]:
    rng = np.random.default_rng()
    found = []
    for group, width in ((4, 128), (1, 64)):
        arrays = _attention_arrays(rng, [1, 17, 400, 1030], 2, group, width, jnp.bfloat16)
        arrays.pop("scales")
        found.append(_compare(f"decode G={group} H={width}", partial(paged_attention_decode, scale=width**-0.5),
                              tuple(arrays.values()), "mosaic"))
        found.append(_compare(f"mixed G={group} H={width}", partial(paged_attention_ragged, scale=width**-0.5),
                              _ragged_arrays(rng, arrays), "mosaic"))
    return found


def speeds(backend: str, *, num_seqs: int, context: int, num_in: int, num_out: int) -> list[Speed]:
    """Decode attention of Llama-3.1-8B's heads, and 4-bit products of its MLP's size or the size given."""
    rng = np.random.default_rng()
    arrays = _attention_arrays(rng, [context] * num_seqs, 8, 4, 128, jnp.bfloat16)
    arrays.pop("scales")
    decode = jax.jit(partial(paged_attention_decode, scale=128**-0.5, backend=backend))
    live_bytes = 2 * num_seqs * context * 8 * 128 * 2
    found = [Speed(f"decode attention, {num_seqs} x {context} tokens", seconds(decode, *arrays.values()), live_bytes)]
    if backend == "mosaic":
        return found
    weight = random_int4(rng, num_in, num_out, 128)
    weight_bytes = sum(array.nbytes for array in weight if array is not None)
    for num_tokens in (1, 16):
        x = jnp.asarray(rng.standard_normal((num_tokens, num_in)), jnp.bfloat16)
        product = jax.jit(partial(int4_matmul, backend=backend))
        found.append(Speed(f"int4_matmul, {num_tokens} x {num_in} x {num_out}", seconds(product, x, weight),
                           weight_bytes))
    return found


def memory_bandwidth(num_bytes: int) -> float:
    """Bytes per second read and written by an elementwise kernel over an array of this size."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)
    return 2 * num_bytes / seconds(jax.jit(lambda x: x + 1), x)


def seconds(function: Callable[..., Any], *args: Any) -> float:
    """Of one call among many in flight; the best of three rounds of at least 50 ms."""
    jax.block_until_ready(function(*args))
    num_calls, best = 1, float("inf")
    for _ in range(3):
        while True:
            start = time.perf_counter()
            results = [function(*args) for _ in range(num_calls)]
            jax.block_until_ready(results)
            taken = time.perf_counter() - start
            best = min(best, taken / num_calls)
            if taken > 0.05 or num_calls >= 256:
                break
            num_calls *= 2
    return best


def random_int4(rng: np.random.Generator, num_in: int, num_out: int, group_size: int) -> Int4Weight:
    packed = rng.integers(-2**31, 2**31, (-(-num_in // BLOCK), num_out, WORDS), np.int32)
    shape = -(-num_in // BLOCK) * BLOCK // group_size, num_out
    return Int4Weight(jnp.asarray(packed), jnp.asarray(rng.random(shape) * 0.01, jnp.bfloat16),
                      jnp.asarray(rng.integers(0, 16, shape), jnp.int8))


def _compare(name: str, function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> Comparison:
    ours, theirs = (jax.tree.leaves(jax.jit(partial(function, backend=which))(*args))
                    for which in (backend, "reference"))
    return Comparison(name, max(_error(a, b) for a, b in zip(ours, theirs, strict=True)))


def _error(ours: jax.Array, theirs: jax.Array) -> float:
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


def _attention_arrays(rng: np.random.Generator, context_lens: list[int], num_kv_heads: int, group: int, width: int,
                      cache_dtype: Any) -> dict[str, Any]:
    """Arguments of paged_attention_decode by name, and "scales" for a quantised cache."""
    num_seqs, columns = len(context_lens), -(-max(context_lens) // BLOCK_SIZE)
    num_blocks = num_seqs * columns + 1
    shape = num_blocks, BLOCK_SIZE, num_kv_heads, width
    is_quantised = jnp.dtype(cache_dtype).itemsize == 1
    caches = [rng.standard_normal(shape, np.float32) * (20 if is_quantised else 1) for _ in range(2)]
    scales = [jnp.asarray(rng.random(num_kv_heads) * 0.05 + 0.02, jnp.float32) if is_quantised else None] * 2
    tables = rng.permutation(np.arange(1, num_blocks)).reshape(num_seqs, columns)
    return dict(q=jnp.asarray(rng.standard_normal((num_seqs, num_kv_heads, group, width)), jnp.bfloat16),
                k_cache=jnp.asarray(caches[0]).astype(cache_dtype), v_cache=jnp.asarray(caches[1]).astype(cache_dtype),
                block_tables=jnp.asarray(tables, jnp.int32), context_lens=jnp.asarray(context_lens, jnp.int32),
                scales=scales)


def _ragged_arrays(rng: np.random.Generator, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """The first two sequences decode; each other one brings its last tokens, up to 70 and 150."""
    context_lens = np.asarray(arrays["context_lens"])
    query_lens = np.array([1, 1, 70, 150], np.int32)
    query_starts = np.cumsum([0, *query_lens[:-1]], dtype=np.int32)
    tiles = [(seq, row) for seq in (2, 3)
             for row in range(query_starts[seq], query_starts[seq] + query_lens[seq], QUERY_TILE)]
    shape = (int(query_lens.sum()) + 3, *arrays["q"].shape[1:])
    q = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    ints = [context_lens, query_starts, query_lens, np.int32(2), *np.array(tiles, np.int32).T, np.int32(len(tiles))]
    return (q, arrays["k_cache"], arrays["v_cache"], arrays["block_tables"], *map(jnp.asarray, ints))


def _qkv_arrays(rng: np.random.Generator, arrays: dict[str, Any], group: int) -> tuple[Any, ...]:
    _, _, num_kv_heads, width = arrays["k_cache"].shape
    qkv = jnp.asarray(rng.standard_normal((9, num_kv_heads, group + 2, width)), jnp.bfloat16)
    angles = jnp.asarray(rng.random((9, width // 2)), jnp.float32)
    slots = jnp.asarray(rng.permutation(64)[:9], jnp.int32)
    return qkv, jnp.cos(angles), jnp.sin(angles), arrays["k_cache"], arrays["v_cache"], slots
