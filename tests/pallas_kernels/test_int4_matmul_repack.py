"""Repackers against decoders of each published layout, written here nibble by nibble, and torch's formulas.

Words are random in all bits, so that every nibble and sign occurs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from pallas_kernels.int4_matmul import (
    Int4Weight,
    Repacked,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    from_nibbles,
    int4_matmul,
)

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


def words(*shape: int) -> Array:
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(*shape: int, dtype: Any = np.float16) -> Array:
    return RNG.uniform(0.01, 0.1, shape).astype(dtype)


def nibble(word: np.int32, number: int) -> int:
    return (int(word) >> (4 * number)) & 15


def decode(weight: Int4Weight, num_features: int) -> Array:
    """[K, N] float64 from the kernel's layout, as layout.py describes it."""
    packed, scale, zeros = (None if array is None else np.asarray(array) for array in weight)
    assert packed is not None and scale is not None and packed.dtype == np.int32
    num_outputs, group = packed.shape[1], packed.shape[0] * 128 // scale.shape[0]
    dense = np.zeros((num_features, num_outputs))
    for k in range(num_features):
        block, feature = divmod(k, 128)
        slab, in_slab = divmod(feature, 32)
        word, half = divmod(in_slab, 2)
        for n in range(num_outputs):
            zero = 8 if zeros is None else int(zeros[k // group, n])
            dense[k, n] = (nibble(packed[block, n, word], slab + 4 * half) - zero) * float(scale[k // group, n])
    return dense


def decode_gptq(qweight: Array, qzeros: Array, scale: Array, g_idx: Array, offset: int) -> Array:
    """AutoGPTQ's formula, in torch."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (torch.from_numpy(qweight)[:, None, :] >> shifts[None, :, None]) & 15
    zeros = (torch.from_numpy(qzeros)[:, :, None] >> shifts[None, None, :]) & 15
    nibbles, zeros = nibbles.reshape(-1, qweight.shape[1]), zeros.reshape(len(qzeros), -1) + offset
    index = torch.from_numpy(g_idx).long()
    return ((nibbles - zeros[index]).double() * torch.from_numpy(scale.astype(np.float64))[index]).numpy()


def decode_awq(qweight: Array, qzeros: Array, scale: Array, group: int) -> Array:
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    dense = np.zeros((len(qweight), scale.shape[1]))
    for k in range(len(qweight)):
        for word in range(qweight.shape[1]):
            for number, column in enumerate(order):
                n, g = 8 * word + column, k // group
                dense[k, n] = (nibble(qweight[k, word], number) - nibble(qzeros[g, word], number)) * float(scale[g, n])
    return dense


def decode_compressed(packed: Array, scale: Array, zero_point: Array | None, g_idx: Array) -> Array:
    """weight = (q - zero point) * scale, q and zero point signed and stored with 8 added; [K, N]."""
    num_outputs, num_features = len(scale), len(g_idx)
    dense = np.zeros((num_features, num_outputs))
    for k in range(num_features):
        g = g_idx[k]
        for n in range(num_outputs):
            q = nibble(packed[n, k // 8], k % 8) - 8
            zero = 0 if zero_point is None else nibble(zero_point[n // 8, g], n % 8) - 8
            dense[k, n] = (q - zero) * float(scale[n, g])
    return dense


def consecutive(num_features: int, num_groups: int) -> Array:
    return (np.arange(num_features) // -(-num_features // num_groups)).astype(np.int32)


@pytest.mark.parametrize(("num_features", "num_groups"), [(256, 8), (256, 4), (256, 2), (320, 1), (320, 5)])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_gptq(num_features, num_groups, checkpoint_format):
    args = words(num_features // 8, 16), words(num_groups, 2), scales(num_groups, 16)
    g_idx = consecutive(num_features, num_groups)
    got = from_gptq(*args, g_idx, symmetric=False, checkpoint_format=checkpoint_format)
    want = decode_gptq(*args, g_idx, offset=1 if checkpoint_format == "gptq" else 0)
    assert got.permutation is None
    assert got.weight.scales.dtype == np.float16
    np.testing.assert_array_equal(decode(got.weight, num_features), want)
    without_g_idx = from_gptq(*args, symmetric=False, checkpoint_format=checkpoint_format)
    jax.tree.map(np.testing.assert_array_equal, without_g_idx.weight, got.weight)


def test_gptq_act_order():
    num_features, num_groups = 384, 3
    args = words(num_features // 8, 16), words(num_groups, 2), scales(num_groups, 16)
    g_idx = RNG.permutation(consecutive(num_features, num_groups))
    got = from_gptq(*args, g_idx, symmetric=False)
    want = decode_gptq(*args, g_idx, offset=1)
    assert got.permutation is not None and sorted(got.permutation) == list(range(num_features))
    np.testing.assert_array_equal(decode(got.weight, num_features), want[got.permutation])
    x = RNG.normal(size=(3, num_features)).astype(np.float32)
    out = int4_matmul(jnp.asarray(x[:, got.permutation]), jax.tree.map(jnp.asarray, got.weight))
    np.testing.assert_allclose(out, x @ want, rtol=1e-4, atol=1e-3)


def test_gptq_symmetric():
    """Stored 7 in the first format and 8 in the second is 8: not kept. Anything else is refused."""
    qweight, scale = words(16, 8), scales(2, 8)
    for checkpoint_format, stored in (("gptq", 0x77777777), ("gptq_v2", -0x77777778)):
        qzeros = np.full((2, 1), stored, np.int64).astype(np.int32)
        options: dict[str, Any] = dict(symmetric=True, checkpoint_format=checkpoint_format)
        got = from_gptq(qweight, qzeros, scale, **options)
        assert got.weight.zeros is None
        want = decode_gptq(qweight, qzeros, scale, consecutive(128, 2), offset=int(checkpoint_format == "gptq"))
        np.testing.assert_array_equal(decode(got.weight, 128), want)
        with pytest.raises(ValueError, match="symmetric=True"):
            from_gptq(qweight, qzeros ^ 0x10, scale, **options)


@pytest.mark.parametrize(("num_features", "group"), [(256, 128), (192, 64), (160, 32), (160, 160)])
def test_awq(num_features, group):
    args = words(num_features, 3), words(num_features // group, 3), scales(num_features // group, 24)
    got = from_awq(*args)
    assert got.permutation is None
    np.testing.assert_array_equal(decode(got.weight, num_features), decode_awq(*args, group))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("num_features", "num_groups"), [(128, 2), (100, 1)])
def test_compressed_tensors(num_features, num_groups, act_order, has_zeros):
    """12 outputs and 100 features: both are padded to words in the file."""
    packed = words(12, -(-num_features // 8))
    scale = scales(12, num_groups, dtype=ml_dtypes.bfloat16)
    zero_point = words(2, num_groups) if has_zeros else None
    g_idx = consecutive(num_features, num_groups)
    g_idx = RNG.permutation(g_idx) if act_order else g_idx
    got = from_compressed_tensors(
        packed, scale, zero_point, g_idx if act_order else None, weight_shape=(12, num_features)
    )
    want = decode_compressed(packed, scale, zero_point, g_idx)
    assert (got.permutation is not None) == (act_order and num_groups > 1)
    want = want if got.permutation is None else want[got.permutation]
    assert got.weight.scales.dtype == ml_dtypes.bfloat16
    assert (got.weight.zeros is None) == (not has_zeros)
    np.testing.assert_array_equal(decode(got.weight, num_features), want)


def test_shards_are_padded_alike():
    """Of 480 features in 3 shards, each shard is what its own 160 features would make."""
    nibbles = RNG.integers(0, 16, (480, 8)).astype(np.uint8)
    scale, zeros = scales(15, 8), RNG.integers(0, 17, (15, 8))
    whole = from_nibbles(nibbles, scale, zeros, num_in_shards=3)
    for shard in range(3):
        features, groups = slice(160 * shard, 160 * (shard + 1)), slice(5 * shard, 5 * (shard + 1))
        alone = from_nibbles(nibbles[features], scale[groups], zeros[groups])
        for name in Int4Weight._fields:
            np.testing.assert_array_equal(np.split(getattr(whole, name), 3)[shard], getattr(alone, name))
        zero_of, scale_of = np.repeat(zeros[groups], 32, axis=0), np.repeat(scale[groups].astype(float), 32, axis=0)
        np.testing.assert_array_equal(decode(alone, 160), (nibbles[features] - zero_of) * scale_of)
    assert not whole.scales[5:8].any()  # groups without a feature


def test_wrong_order_of_nibbles_is_seen():
    """AWQ words read in GPTQ's order."""
    args = words(128, 1), words(1, 1), scales(1, 8)
    want = decode_awq(*args, 128)
    in_order = np.stack([(args[0][:, 0] >> (4 * i)) & 15 for i in range(8)], axis=1).astype(np.uint8)
    zeros = np.stack([(args[1][:, 0] >> (4 * i)) & 15 for i in range(8)], axis=1)
    assert (decode(from_nibbles(in_order, args[2], zeros), 128) != want).any()
    assert (decode(from_awq(*args).weight, 128) == want).all()


def uneven(num_features: int, num_groups: int) -> Array:
    g_idx = consecutive(num_features, num_groups)
    g_idx[0] = num_groups - 1
    return g_idx


GPTQ: dict[str, Any] = dict(qweight=words(32, 16), qzeros=words(2, 2), scales=scales(2, 16), symmetric=False)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"g_idx": uneven(256, 2)}, "g_idx: group 0 has 127 input features, must have 128"),
    ({"g_idx": consecutive(256, 2) + 1}, "g_idx: groups 1 to 2"),
    ({"g_idx": consecutive(128, 2)}, "g_idx"),
    ({"qweight": words(32, 15)}, "qweight"),
    ({"qweight": words(32, 16).astype(np.int64)}, "qweight.*int64"),
    ({"qzeros": words(2, 16)}, "qzeros"),
    ({"scales": scales(3, 16), "qzeros": words(3, 2)}, "scales: 3 groups of 256"),
    ({"checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"num_in_shards": 3}, "num_in_shards=3"),
    ({"num_in_shards": 4}, "num_in_shards=4"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_named(change, message):
    assert isinstance(from_gptq(**GPTQ), Repacked)
    with pytest.raises(ValueError, match=message):
        from_gptq(**{**GPTQ, **change})
