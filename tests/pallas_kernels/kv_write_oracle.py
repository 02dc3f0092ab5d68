"""What the cache should hold, computed in numpy: float64 sums, and a quantiser that looks its numbers up in a table."""

import ml_dtypes
import numpy as np

INT8, E4M3 = np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)


def _e4m3_value(code: int) -> float:
    """arXiv:2209.05433, table 1: four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(127)])
"""The numbers from 0 to 448; a number's code is its index. Code 127 is NaN, bit 7 the sign."""


def stored(x: np.ndarray, dtype: np.dtype, scale: np.ndarray | None = None) -> np.ndarray:
    """What a cache of this dtype holds for x [T, K, H], with scale float32 [T, K] or None.

    Where there is a scale, x * (1 / scale) is rounded to float32 twice, as the API says.
    """
    if dtype not in (INT8, E4M3):
        return x.astype(dtype)
    scaled = x.astype(np.float32)
    scaled = (scaled if scale is None else scaled * (1 / scale[:, :, None])).astype(np.float64)
    if dtype == INT8:
        return np.clip(np.rint(scaled), -128, 127).astype(np.int8)
    size = np.minimum(np.abs(scaled), E4M3_VALUES[-1])
    above = np.clip(np.searchsorted(E4M3_VALUES, size), 1, 126)
    to_above, to_below = E4M3_VALUES[above] - size, size - E4M3_VALUES[above - 1]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = np.where(np.isnan(scaled), 127, np.where(takes_above, above, above - 1))
    return (code | np.signbit(scaled) * 128).astype(np.uint8).view(E4M3)


def scale_of_tokens(scale: np.ndarray | None, slots: np.ndarray, block_size: int) -> np.ndarray | None:
    """float32 [K] or [B, K] -> [T, K]."""
    if scale is None:
        return None
    return scale[slots // block_size] if scale.ndim == 2 else np.broadcast_to(scale, (len(slots), len(scale)))


def poisoned(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Random numbers, NaN among them where the dtype has it."""
    if dtype == INT8:
        return rng.integers(-128, 128, shape, np.int8)
    return np.where(rng.random(shape) < 0.1, np.nan, rng.normal(size=shape)).astype(dtype)


def bits(x: object) -> np.ndarray:
    """The bytes of an array [..., H] as [..., H * itemsize], so that NaN equals itself."""
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8)
