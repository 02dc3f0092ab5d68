"""int4_matmul in plain jax.numpy: the CPU path, and what the kernels are checked against.

"Packed order" here: the features of a block as they come out of its words, all first features of word 0, 1, ... 15 of a
slab, then all second ones. XLA:CPU unpacks in that order without moving anything, so it is x that is reordered.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.int4_matmul.layout import BLOCK, SLAB, SYMMETRIC_ZERO, WORDS, Int4Weight, group_size

_SLABS = BLOCK // SLAB
_SHIFTS = np.int32(4) * np.arange(_SLABS, dtype=np.int32)[:, None] + np.int32(16) * np.arange(2, dtype=np.int32)
_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def int4_matmul(x: jax.Array, weight: Int4Weight, bias: jax.Array | None) -> jax.Array:
    """See api.int4_matmul.

    Block by block of 128 input features: the dequantised weights of one block stay in the CPU's cache, which is 3 to 4
    times as fast for few tokens as dequantising the whole matrix first.
    """
    num_tokens, num_outputs = x.shape[0], weight.packed.shape[1]
    blocks = in_packed_order(x.astype(jnp.float32)).reshape(num_tokens, -1, BLOCK).swapaxes(0, 1)
    scales, zeros = (rows if rows is None else _per_slab(rows, weight) for rows in weight[1:])

    def add_block(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
        x_block, words, scale, zero = block
        dense = _dequantize(words, scale, zero)
        return total + lax.dot_general(x_block, dense, _CONTRACT_LAST, precision=lax.Precision.HIGHEST), None

    total, _ = lax.scan(
        add_block, jnp.zeros((num_tokens, num_outputs), jnp.float32), (blocks, weight.packed, scales, zeros)
    )
    return (total if bias is None else total + bias).astype(x.dtype)


def int4_matmul_dense(x: jax.Array, weight: Int4Weight, bias: jax.Array | None) -> jax.Array:
    """The same by way of all weights in x's dtype: what a GPU does fastest with very many tokens."""
    scales, zeros = (rows if rows is None else _per_slab(rows, weight).swapaxes(0, 1) for rows in weight[1:])
    unpack = jax.vmap(_dequantize, in_axes=(1, 1, None if zeros is None else 1), out_axes=1)
    dense = unpack(weight.packed.swapaxes(0, 1), scales, zeros)
    dense = dense.astype(x.dtype).reshape(dense.shape[0], -1)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    x_packed = in_packed_order(x)
    out = lax.dot_general(x_packed, dense, _CONTRACT_LAST, precision=precision, preferred_element_type=x.dtype)
    return out if bias is None else (out + bias).astype(x.dtype)


def in_packed_order(x: jax.Array) -> jax.Array:
    """[T, K] -> [T, C * 128]: zeros where K is no multiple of 128, features of each block in packed order."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    return x.reshape(x.shape[0], -1, WORDS, 2).swapaxes(2, 3).reshape(x.shape)


def _per_slab(rows: jax.Array, weight: Int4Weight) -> jax.Array:
    """Scales or zero-points [G, N] -> [C, N, slabs of a block]."""
    repeated = jnp.repeat(rows, group_size(weight) // SLAB, axis=0)
    return repeated.reshape(-1, _SLABS, rows.shape[1]).swapaxes(1, 2)


def _dequantize(words: jax.Array, scales: Any, zeros: Any) -> jax.Array:
    """One block: words [N, 16], scales and zero-points (or None) [N, slabs] -> float32 [N, 128] in packed order."""
    words, shifts = jnp.broadcast_arrays(words[:, None, None, :], _SHIFTS[:, :, None])
    nibbles = (lax.shift_right_logical(words, shifts) & 15).reshape(-1, _SLABS, SLAB).astype(jnp.float32)
    zero = SYMMETRIC_ZERO if zeros is None else zeros[:, :, None].astype(jnp.float32)
    return ((nibbles - zero) * scales[:, :, None].astype(jnp.float32)).reshape(-1, BLOCK)
