"""The packed layout of 4-bit weights, and which shapes it allows.

Weights W[K, N] are unsigned nibbles 0..15 that mean (W - zero) * scale. Scale and zero-point belong to a group of input
features of one output; no zero-points mean 8 everywhere (symmetric quantisation).

    packed [C, N, 16] int32, C = ceil(K / 128)
        Block c holds input features 128 c to 128 c + 127, and of each output 64 bytes that lie together. Of word r,
        bits 4 j to 4 j + 3 are W[128 c + 32 j + 2 r, n] and bits 16 + 4 j on are W[128 c + 32 j + 2 r + 1, n], where
        r is 0 to 15 and j is 0 to 3.
    scales [G, N] float16, bfloat16 or float32, G = C * 128 / group size
    zeros  [G, N] int8, 0..16, or None

Why: shifted right by 4 j and masked with 0x000f000f, the 16 words are "slab" j: 32 consecutive input features as pairs
of 16-bit numbers, in the order in which a matrix unit takes its operand's registers. There is no shuffle and no gather.
A group of 32, 64 or 128 features is a whole number of slabs, so that one layout serves them all.

Padding: where K is no multiple of 128, the features that the last block lacks are nibbles of 8, and groups without any
feature have scale 0. x never has such features.

Sharding: outputs (axis N of all three arrays) can be cut anywhere. Input features (axis C of packed, G of the others)
are cut between blocks; `num_in_shards` of the repackers pads each shard by itself, so that all are alike. One group of
all features (G = 1) is not cut: every shard keeps it. Matrices with the same K, group size and order of features can be
joined along N (gate and up; q, k and v).
"""

from typing import Any, NamedTuple

import jax

BLOCK = 128
"""Input features of a packed block; a shard of input features is a multiple of this (after padding)."""
SLAB = 32
"""Consecutive input features that one shift unpacks; the smallest group."""
WORDS = 16
"""int32 words of one block of one output."""
SYMMETRIC_ZERO = 8


class Int4Weight(NamedTuple):
    """A packed weight matrix: a pytree of arrays (JAX's or numpy's), laid out as the module says.

    Attributes:
        packed: [C, N, 16] int32.
        scales: [G, N] float16, bfloat16 or float32.
        zeros: [G, N] int8 zero-points 0..16, or None: 8 everywhere.
    """

    packed: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None


def group_size(weight: Int4Weight) -> int:
    """Input features that share a scale: 32, 64, or a multiple of 128 up to all (padded) features.

    Raises:
        ValueError: scales do not divide the features into such groups.
    """
    num_features, num_groups = weight.packed.shape[0] * BLOCK, weight.scales.shape[0]
    size = num_features // max(num_groups, 1)
    if size * num_groups != num_features or (size % BLOCK and size not in (SLAB, 2 * SLAB)):
        raise ValueError(
            f"scales {weight.scales.shape}: {num_features} input features make no {num_groups} groups of 32, 64 or a "
            "multiple of 128"
        )
    return size


def check(weight: Int4Weight) -> None:
    """Raises ValueError where the arrays do not fit each other."""
    packed, scales, zeros = weight
    if packed.ndim != 3 or packed.shape[2] != WORDS or packed.dtype != "int32":
        raise ValueError(f"packed {packed.shape} {packed.dtype}: must be [C, N, {WORDS}] int32")
    num_outputs = packed.shape[1]
    if scales.ndim != 2 or scales.shape[1] != num_outputs or not _is_scale(scales.dtype):
        raise ValueError(
            f"scales {scales.shape} {scales.dtype}: must be [G, {num_outputs}] float16, bfloat16 or float32"
        )
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != "int8"):
        raise ValueError(f"zeros {zeros.shape} {zeros.dtype}: must be {list(scales.shape)} int8, or None")
    group_size(weight)


def _is_scale(dtype: Any) -> bool:
    return dtype in ("float16", "bfloat16", "float32")
