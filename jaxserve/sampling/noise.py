"""Random numbers per (seed, position, token id), whatever the batch: independent of row, slot and batch size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


def position_keys(seed_low: Array, seed_high: Array, positions: Array) -> Array:
    """Key words uint32 [S, 2]: fold_in(key(seed), position) of JAX's threefry generator."""
    words = jnp.stack([seed_high, seed_low], axis=-1).astype(jnp.uint32)
    fold = jax.vmap(lambda key, position: jax.random.key_data(jax.random.fold_in(key, position)))
    return fold(jax.random.wrap_key_data(words, impl="threefry2x32"), positions)


def exponential(keys: Array, vocab_size: int) -> Array:
    """Standard exponential variables [S, V] in float32, positive, from keys [S, 2].

    Token i's is a hash of the key and i: two rounds of an integer mixer instead of threefry's twenty, since a whole
    vocabulary is drawn for every row (32 x 49152 on a CPU core: 1 ms instead of 20). It needs no neighbour, so a
    vocabulary sharded over devices is drawn where it lies.
    """
    token_ids = lax.broadcasted_iota(jnp.uint32, (keys.shape[0], vocab_size), 1)
    bits = _mix(_mix(token_ids ^ keys[:, :1]) ^ keys[:, 1:])
    # The race is won by small values: keep their relative precision. u in (0, 1); u = 1 (rounding) becomes +inf,
    # which never wins.
    u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    return -jnp.log1p(-u)


def _mix(h: Array) -> Array:
    """A bijection of uint32 in which every input bit reaches every output bit (xorshift-multiply, murmur3's form)."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
    h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
    return h ^ (h >> 16)
