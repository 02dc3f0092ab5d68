"""kv_write through Pallas and Triton: one launch for keys and values, in place."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kv_write.checks import QUANTISED

_ENOUGH_PROGRAMS = 512  # keep the largest card busy; tokens share a program only where there would be more
_PROGRAM_ELEMENTS = 1024  # a program of several tokens has at most these, in its largest tile
_WARP_ELEMENTS = 256  # one load of 16 bytes per thread
_MAX_WARPS = 16


def kv_write(
    k: jax.Array,
    v: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See api.kv_write; `interpret` runs the kernel in Pallas' interpreter."""
    num_tokens, num_kv_heads, head_dim = k.shape
    tokens, num_warps = program_size(num_tokens, num_kv_heads, pl.next_power_of_2(head_dim))
    new_k, new_v = launch(
        functools.partial(_kernel, tokens=tokens),
        "kv_write",
        (pl.cdiv(num_tokens, tokens), num_kv_heads),
        ((k_cache, v_cache), (k, v), slot_mapping, (k_scale, v_scale)),
        [k_cache, v_cache],
        aliases={0: 0, 1: 1},
        num_warps=num_warps,
        interpret=interpret,
    )
    return new_k, new_v


def refusal(cache: jax.Array) -> str | None:
    """Why these kernels cannot write such a cache; None if they can."""
    # Pallas computes offsets in 32 bits up to 2^32 bytes, and Triton takes them as signed.
    if cache.dtype.itemsize == 1 and 2**31 < math.prod(cache.shape) <= 2**32:
        return f"k_cache {cache.shape} {cache.dtype}: offsets of one-byte elements wrap from 2^31 to 2^32"
    return None


def _kernel(
    old_caches: tuple[Any, Any],
    new_rows: tuple[Any, Any],
    slots: Any,
    scales: tuple[Any | None, Any | None],
    *new_caches: Any,
    tokens: int,
) -> None:
    """The rows of one head of some tokens. Other slots stay as they are, for new and old are the same memory."""
    num_tokens, _, head_dim = new_rows[0].shape
    token = program_tokens(tokens, num_tokens)[:, None]
    head = pl.program_id(1)
    lane = jnp.arange(pl.next_power_of_2(head_dim))[None]
    slot = plt.load(slots.at[token])
    for rows_ref, cache_ref, scale_ref in zip(new_rows, new_caches, scales, strict=True):
        rows = load_lanes(rows_ref.at[token, head, lane], lane_mask(lane, head_dim))
        store_rows(cache_ref, rows, slot, head, lane, scale_ref)


def launch(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, int],
    inputs: tuple[Any, ...],
    outputs: Sequence[Any],
    *,
    aliases: dict[int, int],
    num_warps: int,
    interpret: bool,
) -> Sequence[jax.Array]:
    """Calls kernel(*refs of inputs, *refs of outputs).

    Args:
        inputs: arrays and tuples of arrays; the kernel gets tuples of refs. None stays None.
        outputs: arrays or ShapeDtypeStructs with the outputs' shapes and dtypes.
        aliases: number among all input arrays -> number of the output in the same memory.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=jax.tree.map(lambda _: whole, inputs),
        out_specs=[whole] * len(outputs),
        out_shape=[jax.ShapeDtypeStruct(output.shape, output.dtype) for output in outputs],
        input_output_aliases=aliases,
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(*inputs)


def program_size(num_tokens: int, programs_per_token: int, elements_per_token: int) -> tuple[int, int]:
    """How many tokens a program takes, a power of two, and its number of warps."""
    spare = max(num_tokens * programs_per_token // _ENOUGH_PROGRAMS, 1)
    fitting = max(_PROGRAM_ELEMENTS // elements_per_token, 1)
    tokens = 1 << (min(spare, fitting).bit_length() - 1)
    return tokens, min(max(tokens * elements_per_token // _WARP_ELEMENTS, 1), _MAX_WARPS)


def program_tokens(tokens: int, num_tokens: int) -> jax.Array:
    """[tokens] int32, those of this program. Past the end the last one is repeated, and written again with the same
    values: Pallas' interpreter writes masked lanes back, so that a mask would need addresses of its own."""
    return jnp.minimum(pl.program_id(0) * tokens + jnp.arange(tokens), num_tokens - 1)


def lane_mask(lane: jax.Array, width: int) -> jax.Array | None:
    return None if lane.size == width else lane < width


def load_lanes(ref: Any, mask: jax.Array | None) -> jax.Array:
    """What lies there, 0 where masked."""
    return plt.load(ref, mask=mask, other=None if mask is None else 0)


def store_rows(
    cache_ref: Any, rows: jax.Array, slot: jax.Array, head: jax.Array, lane: jax.Array, scale_ref: Any | None
) -> None:
    """Puts rows of one head into their slots, quantised if the cache is.

    Args:
        cache_ref: [B, P, K, H].
        rows: [tokens, ..., lanes], any float dtype; lanes from H on are not stored.
        slot: int32 [tokens, ..., 1].
        head: int32 scalar.
        lane: int32 [1, ..., lanes].
        scale_ref: float32 [K] or [B, K], or None for 1.
    """
    _, block_size, _, head_dim = cache_ref.shape
    block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
    if cache_ref.dtype in QUANTISED:
        rows = rows.astype(jnp.float32)
        if scale_ref is not None:
            rows = rows * (1 / plt.load(scale_ref.at[head] if len(scale_ref.shape) == 1 else scale_ref.at[block, head]))
        rows = _to_int8(rows) if cache_ref.dtype == jnp.int8 else _to_e4m3(rows)
    plt.store(cache_ref.at[block, offset, head, lane], rows.astype(cache_ref.dtype), mask=lane_mask(lane, head_dim))


def _to_int8(x: jax.Array) -> jax.Array:
    return _round_to_int(jnp.clip(x, -128.0, 127.0), 1.0).astype(jnp.int8)


def _to_e4m3(x: jax.Array) -> jax.Array:
    """float32 to float8_e4m3fn by integer arithmetic: devices before 8.9 have no instruction for it."""
    magnitude = jnp.minimum(jnp.abs(x), 448.0)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # Of 23 bits of mantissa 3 stay, and the exponent's bias becomes 7 instead of 127. Where rounding up carries, it
    # carries into the exponent, as it should.
    is_odd = (bits >> 20) & 1
    normal = ((bits + 0x7FFFF + is_odd) >> 20) - ((127 - 7) << 3)
    subnormal = _round_to_int(magnitude, 2.0**-9)  # 8 of these steps are the smallest normal number, coded 8
    code = jnp.where(magnitude < 2.0**-6, subnormal, normal)
    code = jnp.where(x == x, code, 0x7F)  # NaN
    sign = (lax.bitcast_convert_type(x, jnp.int32) >> 24) & 0x80
    return lax.bitcast_convert_type((code | sign).astype(jnp.uint8), jnp.float8_e4m3fn)


def _round_to_int(x: jax.Array, step: float) -> jax.Array:
    """x / step to the nearest int32, ties to even. step is a power of two; |x| < 2^22 * step.

    In the sum with 1.5 * 2^23 steps the last bit is worth one step: the adder rounds.
    """
    anchor = np.float32(1.5 * 2**23 * step)
    return lax.bitcast_convert_type(x + anchor, jnp.int32) - anchor.view(np.int32)
