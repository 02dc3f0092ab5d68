"""Unpacking a slab of 4-bit weights inside a Triton kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_kernels.int4_matmul.layout import SYMMETRIC_ZERO


def unpack(
    words: jax.Array, zeros: jax.Array | None, scale: jax.Array | None, dtype: jnp.dtype, *, interpret: bool
) -> jax.Array:
    """The slab in the lowest nibbles of either half of each word: (q - zero) * scale.

    Args:
        words: [outputs, WORDS] int32; bits 0..3 and 16..19 count.
        zeros: [outputs] int8 zero-points, or None: 8.
        scale: [outputs], or None: 1.
        dtype: bfloat16 or float16; anything in Pallas' interpreter, which cannot run PTX.

    Returns:
        [outputs, SLAB] in dtype. q - zero is exact; scaled, it is rounded once (and so is the scale before).
    """
    if interpret:
        zero = SYMMETRIC_ZERO if zeros is None else zeros.astype(jnp.int32)[:, None]
        factor = 1 if scale is None else scale.astype(dtype)[:, None]
        return _interleave(*(((half & 15) - zero).astype(dtype) * factor for half in (words, words >> 16)))
    pairs = _unpack_pairs(words, zeros, scale, dtype)
    halves = (half.astype(jnp.int16) for half in (pairs, lax.shift_right_logical(pairs, jnp.int32(16))))
    return lax.bitcast_convert_type(_interleave(*halves), dtype)


def _interleave(even: jax.Array, odd: jax.Array) -> jax.Array:
    """[M, N] twice -> [M, 2 N]: even[0], odd[0], even[1], ..."""
    return lax.concatenate([even[:, :, None], odd[:, :, None]], 2).reshape(even.shape[0], -1)


def _unpack_pairs(words: jax.Array, zeros: jax.Array | None, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """[outputs, WORDS] int32: both weights of each word, as 16-bit numbers side by side."""
    operands = [words]
    if zeros is not None:
        minus_offset = np.uint32(_PAIRS[dtype.name].minus_offset).view(np.int32)
        operands.append((zeros.astype(jnp.int32) * _TWICE | minus_offset)[:, None])
    if scale is not None:
        bits = lax.bitcast_convert_type(scale.astype(dtype), jnp.int16).astype(jnp.int32)
        operands.append(((bits & 0xFFFF) * _TWICE)[:, None])
    (pairs,) = plt.elementwise_inline_asm(
        unpack_ptx(dtype.name, has_zeros=zeros is not None, has_scale=scale is not None),
        args=[jnp.broadcast_to(operand, words.shape) for operand in operands],
        constraints="=r" + ",r" * len(operands),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
    )
    return pairs


def unpack_ptx(dtype: str, *, has_zeros: bool, has_scale: bool) -> str:
    """PTX for a pair of weights, $0, from a word, $1, and the pairs -(offset + zero) and scale, where there are such.

    A nibble put under the exponent of the number `offset`, whose last bit of mantissa is worth 1, makes offset + q. It
    is PTX because the compilers, left to themselves, work on each 16-bit half alone, with twice the instructions.
    """
    pairs = _PAIRS[dtype]
    registers = iter(["$2", "$3"])
    minus = next(registers) if has_zeros else f"{pairs.minus_offset | SYMMETRIC_ZERO * _TWICE:#010x}"
    lines = [
        ".reg .b32 one, offset, minus, q",
        f"mov.b32 one, {pairs.one:#010x}",
        f"mov.b32 offset, {pairs.offset:#010x}",
        f"mov.b32 minus, {minus}",
        f"lop3.b32 q, $1, 0x000f000f, offset, {_AND_OR:#04x}",
        f"fma.rn.{pairs.ptx_type} {'q' if has_scale else '$0'}, q, one, minus",
    ]
    if has_scale:
        lines += ["mov.b32 minus, 0x80008000", f"fma.rn.{pairs.ptx_type} $0, q, {next(registers)}, minus"]
    return "{ " + " ".join(f"{line};" for line in lines) + " }"


_TWICE = 0x10001  # times 16 bits: those bits in both halves of a word
_AND_OR = (0xF0 & 0xCC) | 0xAA  # how lop3 is told (a & b) | c


@dataclass(frozen=True)
class _Pairs:
    """Two numbers of 16 bits in a word: constants, each twice."""

    ptx_type: str
    one: int
    offset: int

    @property
    def minus_offset(self) -> int:
        return self.offset | 0x80008000


_PAIRS = {
    "bfloat16": _Pairs("bf16x2", one=0x3F80 * _TWICE, offset=0x4300 * _TWICE),  # 2^7
    "float16": _Pairs("f16x2", one=0x3C00 * _TWICE, offset=0x6400 * _TWICE),  # 2^10
}
