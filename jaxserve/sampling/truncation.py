"""min-p, top-k and top-p as one number per row: how far below the best logit a token may lie."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.sampling.state import SamplingInputs
from jaxserve.sampling.top import top_k

NUM_CANDIDATES = 64
"""Likeliest tokens that are looked at before the whole vocabulary is searched: nearly always they suffice."""


Bounds = tuple[Array, Array, Array, Array]  # of a search: low, high (bits of floats), weights up to each of them


def cutoffs(below: Array, inputs: SamplingInputs, active: Array) -> Array:
    """Largest distance below the best logit that still is kept, float32 [S]; inf where nothing is limited.

    min-p first, then top-k, then top-p of the probability that is left (Holtzman et al., arXiv:1904.09751). Tokens
    equal at the limit are all kept, and so is always the best one.

    Args:
      below: best logit minus logit, divided by the temperature, float32 [S, V], at least 0.
      inputs: the requests' parameters.
      active: bool [S], rows whose result matters; the others shall cause no work.
    """
    limit = jnp.abs(jnp.log(inputs.min_p))  # inf for min_p 0
    by_count = active & (inputs.top_k > 0) & (inputs.top_k < below.shape[-1])
    by_mass = active & (inputs.top_p < 1)
    return lax.cond(
        jnp.any(by_count | by_mass),
        lambda: _limit(below, limit, inputs.top_k, by_count, inputs.top_p, by_mass),
        lambda: limit,
    )


def _limit(below: Array, limit: Array, count: Array, by_count: Array, top_p: Array, by_mass: Array) -> Array:
    """The limits from the nearest candidates; from a search where these do not reach far enough.

    Which of the two is decided row by row, lest a request's tokens depend on its neighbours in the batch.
    """
    size = below.shape[-1]
    num_candidates = min(NUM_CANDIDATES, size)
    nearest = -top_k(-below, num_candidates)[0]
    last = nearest[:, -1]

    index = jnp.clip(count - 1, 0, num_candidates - 1)[:, None]
    kth = jnp.take_along_axis(nearest, index, axis=-1)[:, 0]
    search = by_count & (count > num_candidates)
    target = count.astype(jnp.float32)
    kth = _search_where(search, kth, below, jnp.zeros_like(target), target, last, jnp.full_like(target, jnp.inf))
    limit = jnp.where(by_count, jnp.minimum(limit, kth), limit)

    total = jnp.sum(jnp.where(below <= limit[:, None], jnp.exp(-below), 0.0), axis=-1)
    target = top_p * total
    reached = jnp.cumsum(jnp.exp(-nearest), axis=-1) >= target[:, None]
    first = jnp.argmax(reached, axis=-1)[:, None]
    nucleus = jnp.take_along_axis(nearest, first, axis=-1)[:, 0]
    search = by_mass & ~reached[:, -1]
    # The V tokens further away than this weigh less than 1 - p of the best one alone.
    far = math.log(size) - jnp.log1p(-top_p) + 1.0
    nucleus = _search_where(search, nucleus, below, jnp.ones_like(target), target, last, jnp.minimum(far, limit))
    return jnp.where(by_mass, jnp.minimum(limit, nucleus), limit)


def _search_where(
    active: Array, otherwise: Array, below: Array, decay: Array, target: Array, low: Array, high: Array
) -> Array:
    """[S]: where active, a t between low and high for which the tokens with below <= t are the fewest that weigh
    `target` or more together; a token weighs exp(-decay * below), so 1 if decay is 0.

    Tokens nearer than `low` weigh less than the target, those up to `high` as much or more. Bisection on the bits:
    non-negative floats are ordered like the integers with the same bits.
    """

    def weight(distance: Array, decay: Array) -> Array:
        return jnp.exp(jnp.where(decay == 0, 0.0, -distance))

    def is_open(bounds: Bounds) -> Array:
        low, high, at_low, at_high = bounds
        # Two tokens between low and high would weigh twice as much as one at high.
        return (high - low > 1) & (at_high - at_low > 1.5 * weight(_as_float(high), decay))

    def halve(bounds: Bounds) -> Bounds:
        low, high, at_low, at_high = bounds
        middle = low + (high - low) // 2
        near = below <= _as_float(middle)[:, None]
        at_middle = jnp.sum(jnp.where(near, weight(below, decay[:, None]), 0.0), axis=-1)
        going, enough = is_open(bounds), at_middle >= target
        up, down = going & ~enough, going & enough
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, at_middle, at_low),
            jnp.where(down, at_middle, at_high),
        )

    def search() -> Array:
        bounds = _as_bits(low) - 1, jnp.where(active, _as_bits(high), 0)
        unknown = jnp.full_like(target, jnp.inf)
        return _as_float(lax.while_loop(lambda b: jnp.any(is_open(b)), halve, (*bounds, -unknown, unknown))[1])

    return jnp.where(active, lax.cond(jnp.any(active), search, lambda: otherwise), otherwise)


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _as_bits(values: Array) -> Array:
    return lax.bitcast_convert_type(jnp.abs(values), jnp.int32)  # -0.0 would be the least integer
