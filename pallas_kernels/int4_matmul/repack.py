"""Repackers from the 4-bit layouts of checkpoints into the kernel's (layout.py); numpy, on the host, once at load.

All read one block of input features at a time, so that a matrix costs little more memory than its packed form. Each
takes `num_in_shards`: into how many equal parts tensor parallelism will cut the input features. Every part is padded by
itself to a multiple of 128, and must hold whole groups (unless there is but one group).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pallas_kernels.int4_matmul.layout import BLOCK, SLAB, SYMMETRIC_ZERO, WORDS, Int4Weight

Array = np.ndarray[Any, Any]

_NIBBLES = 8  # in a word of a checkpoint
_AWQ_NIBBLE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Which nibble of an AWQ word holds output 8 i + 0, 8 i + 1, ...: the format stores outputs 0, 2, 4, 6, 1, 3, 5, 7."""
_GPTQ_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class Repacked(NamedTuple):
    """A repacked matrix.

    Attributes:
        weight: numpy arrays.
        permutation: [K] int32, or None. Input feature i of `weight` is feature permutation[i] of the checkpoint: give
            int4_matmul x[:, permutation], or permute the outputs of the layer before.
    """

    weight: Int4Weight
    permutation: Array | None = None


def from_gptq(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    *,
    symmetric: bool,
    checkpoint_format: str = "gptq",
    num_in_shards: int = 1,
) -> Repacked:
    """GPTQ (Frantar et al. 2023, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

    Args:
        qweight: [K / 8, N] int32; nibble i of word j is input feature 8 j + i.
        qzeros: [G, N / 8] int32; nibble i of word j is output 8 j + i.
        scales: [G, N] float16, bfloat16 or float32.
        g_idx: [K] int32, the group of each feature, or None: consecutive ones. Any other order (act-order, desc_act)
            is sorted by group here, and `permutation` says how.
        symmetric: all zero-points are 8 (checked), and are dropped.
        checkpoint_format: "gptq": stored zero-points are one less than meant (0..15 mean 1..16), as AutoGPTQ did by
            accident and everyone after it for compatibility; "gptq_v2": they are as stored.

    Raises:
        ValueError: shapes or dtypes disagree, act-order groups are of unequal sizes, zero-points are not symmetric, or
            shards do not hold whole groups.
    """
    if checkpoint_format not in _GPTQ_ZERO_OFFSETS:
        raise ValueError(f"checkpoint_format={checkpoint_format!r}: allowed are {list(_GPTQ_ZERO_OFFSETS)}")
    num_outputs, num_features = scales.shape[-1], qweight.shape[0] * _NIBBLES
    _check("scales", scales, (None, num_outputs))
    _check("qweight", qweight, (None, num_outputs), "int32")
    _check("qzeros", qzeros, (len(scales), -(-num_outputs // _NIBBLES)), "int32")
    zeros = _nibbles(qzeros)[:, :num_outputs] + np.uint8(_GPTQ_ZERO_OFFSETS[checkpoint_format])

    def read_rows(rows: Array) -> Array:
        return (qweight[rows // _NIBBLES] >> (4 * (rows % _NIBBLES))[:, None]) & 15

    order = _order(g_idx, num_features, len(scales))
    return _repack(read_rows, num_features, scales, zeros, symmetric, order, num_in_shards)


def from_awq(
    qweight: Array, qzeros: Array, scales: Array, *, symmetric: bool = False, num_in_shards: int = 1
) -> Repacked:
    """AWQ (Lin et al. 2024, arXiv:2306.00978), the "gemm" version of AutoAWQ.

    Args:
        qweight: [K, N / 8] int32; nibbles 0..7 of word j are outputs 8 j + 0, 2, 4, 6, 1, 3, 5, 7.
        qzeros: [G, N / 8] int32, likewise; zero-points are as stored.
        scales: [G, N] float16, bfloat16 or float32.
        symmetric: all zero-points are 8 (checked), and are dropped.

    Raises:
        ValueError: shapes or dtypes disagree, zero-points are not symmetric, or shards do not hold whole groups.
    """
    num_features, num_outputs = qweight.shape[0], scales.shape[-1]
    _check("scales", scales, (None, num_outputs))
    _check("qweight", qweight, (None, num_outputs / _NIBBLES), "int32")
    _check("qzeros", qzeros, (len(scales), num_outputs / _NIBBLES), "int32")
    zeros = _nibbles(qzeros, _AWQ_NIBBLE)
    return _repack(
        lambda rows: _nibbles(qweight[rows], _AWQ_NIBBLE), num_features, scales, zeros, symmetric, None, num_in_shards
    )


def from_compressed_tensors(
    weight_packed: Array,
    weight_scale: Array,
    weight_zero_point: Array | None = None,
    weight_g_idx: Array | None = None,
    *,
    weight_shape: tuple[int, int],
    num_in_shards: int = 1,
) -> Repacked:
    """The pack-quantized format of compressed-tensors, 4 bits.

    Args:
        weight_packed: [N, ceil(K / 8)] int32; nibble i of word j is input feature 8 j + i, plus 8.
        weight_scale: [N, G] float16, bfloat16 or float32.
        weight_zero_point: [ceil(N / 8), G] int32; nibble i of word j is output 8 j + i, plus 8. None: symmetric.
        weight_g_idx: [K] int32, as g_idx of from_gptq.
        weight_shape: (N, K).

    Raises:
        ValueError: shapes or dtypes disagree, act-order groups are of unequal sizes, or shards do not hold whole
            groups.
    """
    num_outputs, num_features = (int(size) for size in weight_shape)
    _check("weight_packed", weight_packed, (num_outputs, -(-num_features // _NIBBLES)), "int32")
    _check("weight_scale", weight_scale, (num_outputs, None))
    num_groups = weight_scale.shape[1]
    zeros = None
    if weight_zero_point is not None:
        _check("weight_zero_point", weight_zero_point, (-(-num_outputs // _NIBBLES), num_groups), "int32")
        zeros = _nibbles(weight_zero_point.T)[:, :num_outputs]

    def read_rows(rows: Array) -> Array:
        return ((weight_packed[:, rows // _NIBBLES] >> (4 * (rows % _NIBBLES))) & 15).astype(np.uint8).T

    order = _order(weight_g_idx, num_features, num_groups)
    return _repack(read_rows, num_features, weight_scale.T, zeros, zeros is None, order, num_in_shards)


def from_nibbles(nibbles: Array, scales: Array, zeros: Array | None = None, *, num_in_shards: int = 1) -> Int4Weight:
    """Packs weights that lie one a byte.

    Args:
        nibbles: [K, N] uint8, 0..15.
        scales: [G, N] float16, bfloat16 or float32, for consecutive groups.
        zeros: [G, N] integers 0..16, or None: 8.

    Raises:
        ValueError: shapes disagree, or shards do not hold whole groups.
    """
    _check("nibbles", nibbles, (None, scales.shape[-1]), "uint8")
    _check("scales", scales, (None, nibbles.shape[1]))
    if zeros is not None:
        _check("zeros", zeros, scales.shape)
    return _repack(
        nibbles.__getitem__, len(nibbles), scales, zeros, zeros is None, None, num_in_shards
    ).weight


def _repack(
    read_rows: Callable[[Array], Array],
    num_features: int,
    scales: Array,
    zeros: Array | None,
    symmetric: bool,
    order: Array | None,
    num_in_shards: int,
) -> Repacked:
    """read_rows: numbers of R input features in the checkpoint -> [R, N], their nibbles."""
    num_groups, num_outputs = scales.shape
    group = _group_size(num_features, num_groups)
    shard_features = num_features // num_in_shards
    if num_features % num_in_shards or (num_groups > 1 and num_in_shards > 1 and shard_features % group):
        raise ValueError(
            f"num_in_shards={num_in_shards}: {num_features} input features must make shards of whole groups of {group}"
        )
    if symmetric and zeros is not None:
        if (zeros != SYMMETRIC_ZERO).any():
            found = np.unique(zeros).tolist()
            raise ValueError(f"symmetric=True: zero-points are {found}, must all be {SYMMETRIC_ZERO}")
        zeros = None
    shard_blocks = -(-shard_features // BLOCK)
    packed = np.empty((num_in_shards * shard_blocks, num_outputs, WORDS), np.int32)
    for block, words in enumerate(packed):
        shard, block_of_shard = divmod(block, shard_blocks)
        first, end = block_of_shard * BLOCK, min((block_of_shard + 1) * BLOCK, shard_features)
        rows = np.arange(shard * shard_features + first, shard * shard_features + end)
        words[:] = _words(read_rows(rows if order is None else order[rows]))
    groups_of_shard = shard_blocks * BLOCK // group if num_groups > 1 else 1
    scales = _pad_groups(scales, num_in_shards, groups_of_shard, 0)
    if zeros is not None:
        zeros = _pad_groups(zeros.astype(np.int8), num_in_shards, groups_of_shard, SYMMETRIC_ZERO)
    permutation = None if order is None else order.astype(np.int32)
    return Repacked(Int4Weight(packed, scales, zeros), permutation)  # type: ignore[arg-type]


def _words(nibbles: Array) -> Array:
    """Up to 128 input features [R, N] of a block -> its words, int32 [N, 16]."""
    block = np.full((BLOCK, nibbles.shape[1]), SYMMETRIC_ZERO, np.uint8)
    block[: len(nibbles)] = nibbles
    slabs = block.reshape(2, 2, WORDS, 2, -1)  # slab 2 a + b, word, half, output
    halves = slabs[:, 0] | (slabs[:, 1] << 4)  # byte a of each half of each word
    return halves.transpose(3, 1, 2, 0).reshape(-1, 4 * WORDS).view("<i4")


def _pad_groups(rows: Array, num_in_shards: int, groups_of_shard: int, value: int) -> Array:
    """[G, N] -> [num_in_shards * groups_of_shard, N], contiguous; one group for all features stays one."""
    if len(rows) == 1:
        return np.ascontiguousarray(rows)
    shards = rows.reshape(num_in_shards, -1, rows.shape[1])
    padded = np.full((num_in_shards, groups_of_shard, rows.shape[1]), value, rows.dtype)
    padded[:, : shards.shape[1]] = shards
    return padded.reshape(-1, rows.shape[1])


def _nibbles(words: Array, nibble: Array | None = None) -> Array:
    """int32 [M, W] -> uint8 [M, 8 W]: of each word these nibbles, by default from the lowest up."""
    nibble = np.arange(_NIBBLES) if nibble is None else nibble
    return ((words[:, :, None] >> (4 * nibble)) & 15).astype(np.uint8).reshape(len(words), -1)


def _group_size(num_features: int, num_groups: int) -> int:
    if num_groups == 1:
        return num_features
    for size in (SLAB, 2 * SLAB, BLOCK):
        if -(-num_features // size) == num_groups:
            return size
    raise ValueError(
        f"scales: {num_groups} groups of {num_features} input features; allowed are groups of 32, 64, 128 or all"
    )


def _order(g_idx: Array | None, num_features: int, num_groups: int) -> Array | None:
    """Input features sorted by group, or None if they are."""
    group = _group_size(num_features, num_groups)
    if g_idx is None:
        return None
    _check("g_idx", g_idx, (num_features,))
    if (g_idx == np.arange(num_features) // group).all():
        return None
    if g_idx.min() < 0 or g_idx.max() >= num_groups:
        raise ValueError(f"g_idx: groups {g_idx.min()} to {g_idx.max()}, must be 0 to {num_groups - 1}")
    sizes = np.bincount(g_idx, minlength=num_groups)
    if (sizes != group).any():
        wrong = int(np.flatnonzero(sizes != group)[0])
        raise ValueError(f"g_idx: group {wrong} has {sizes[wrong]} input features, must have {group}, as all groups")
    return np.argsort(g_idx, kind="stable")


def _check(name: str, array: Array, shape: tuple[float | None, ...], dtype: str | None = None) -> None:
    fits = array.ndim == len(shape) and all(
        size in (None, actual) for size, actual in zip(shape, array.shape, strict=True)
    )
    if not fits or (dtype and array.dtype != dtype):
        allowed = ", ".join("?" if size is None else f"{size:g}" for size in shape)
        raise ValueError(f"{name} {array.shape} {array.dtype}: must be [{allowed}] {dtype or ''}".rstrip())
