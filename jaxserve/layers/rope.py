"""Rotary position embeddings (arXiv:2104.09864) and the ways to stretch them past the trained context.

Frequencies are made once on the host, in float32 step by step as transformers makes them, so that both round alike.
"""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import RopeConfig

_f32 = np.float32


@lru_cache(maxsize=64)
def rope_frequencies(rope: RopeConfig, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """Radians per position of each rotated pair, and the factor on cos and sin.

    "dynamic" raises the base with the length of the sequence once it exceeds the trained context. transformers follows
    the sequence as it grows; keys in a KV cache are already rotated, so an engine has to choose one length. This one
    takes `max(original_max_position, max_position)`, the longest sequence it will serve: inside the trained context,
    and for sequences of that very length, the result is transformers'. (vLLM fixes it too, always at factor times the
    trained context, which changes the answers to short prompts.)

    Args:
      head_dim: H.
      max_position: longest sequence that the model will serve, in tokens.

    Returns:
      float32 [H/2] and a float.
    """
    if rope.kind == "linear":
        return _plain(rope.theta, head_dim) / _f32(rope.factor), 1.0
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, max_position), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, head_dim), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    return _plain(rope.theta, head_dim), 1.0


def rope_tables(rope: RopeConfig, head_dim: int, max_position: int,
                positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every row's angles, float32 [T, H/2] each; one pair serves all layers.

    Args:
      positions: [T] int32, each token's place in its sequence.
    """
    frequencies, factor = rope_frequencies(rope, head_dim, max_position)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _powers(theta: float, head_dim: int) -> np.ndarray:
    # The exponents are rounded to float32, as torch's are; its powers are then right to the last bit, numpy's are not.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / _f32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _plain(theta: float, head_dim: int) -> np.ndarray:
    return _f32(1.0) / _powers(theta, head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, max_position: int) -> np.ndarray:
    trained = rope.original_max_position or max_position
    longest = max(trained, max_position)
    stretch = rope.factor * longest / trained - (rope.factor - 1)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1's reference code)."""
    assert rope.original_max_position is not None
    trained = rope.original_max_position
    plain = _plain(rope.theta, head_dim)
    wavelength = 1 / plain * _f32(2 * math.pi)  # torch divides a number by a tensor in these two roundings
    turns = 1 / wavelength * _f32(trained)
    weight = (turns - _f32(rope.low_freq_factor)) / _f32(rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - weight) * plain / _f32(rope.factor) + weight * plain
    too_long = wavelength > trained / rope.low_freq_factor
    too_short = wavelength < trained / rope.high_freq_factor
    return np.where(too_long, plain / _f32(rope.factor), np.where(too_short, plain, blended))


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Blends stretched and plain frequencies by how often a pair turns in the trained context (arXiv:2309.00071)."""
    assert rope.original_max_position is not None
    trained = rope.original_max_position

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    keep = 1 - np.clip((pairs - _f32(low)) / _f32(high - low), 0, 1)
    powers = _powers(rope.theta, head_dim)
    return (1 / (_f32(rope.factor) * powers)) * (1 - keep) + (1 / powers) * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
