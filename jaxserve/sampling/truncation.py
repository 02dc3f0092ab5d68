"""min-p, top-k and top-p as one number per row: how far below the best logit a token may lie."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxserve.sampling.state import SamplingInputs
from jaxserve.sampling.top import top_k

NUM_CANDIDATES = 64
"""Likeliest tokens that are looked at before the whole vocabulary is searched: nearly always they suffice."""


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
    kth = _search_where(search, kth, below, jnp.ones_like, target, last, jnp.full_like(target, jnp.inf))
    limit = jnp.where(by_count, jnp.minimum(limit, kth), limit)

    total = jnp.sum(jnp.where(below <= limit[:, None], _weight(below), 0.0), axis=-1)
    target = top_p * total
    reached = jnp.cumsum(_weight(nearest), axis=-1) >= target[:, None]
    nucleus = jnp.min(jnp.where(reached, nearest, jnp.inf), axis=-1)
    search = by_mass & ~reached[:, -1]
    # The V tokens further away than this weigh less than 1 - p of the best one alone.
    far = math.log(size) - jnp.log1p(-top_p) + 1.0
    nucleus = _search_where(search, nucleus, below, _weight, target, last, jnp.minimum(far, limit))
    return jnp.where(by_mass, jnp.minimum(limit, nucleus), limit)


def _weight(below: Array) -> Array:
    return jnp.exp(-below)


def _search_where(
    active: Array,
    otherwise: Array,
    below: Array,
    weight: Callable[[Array], Array],
    target: Array,
    low: Array,
    high: Array,
) -> Array:
    """[S]: where active, a t between low and high for which the tokens with below <= t are the fewest that weigh
    `target` or more together; `weight(below)` does not increase.

    Tokens nearer than `low` weigh less than the target, those up to `high` as much or more. Bisection on the bits:
    non-negative floats are ordered like the integers with the same bits.
    """

    def is_open(bounds: Array) -> Array:
        low, high, at_low, at_high = bounds
        # Two tokens between low and high would weigh twice as much as one at high.
        return (_as_bits(high) - _as_bits(low) > 1) & (at_high - at_low > 1.5 * weight(high))

    def halve(bounds: Array) -> Array:
        low, high, at_low, at_high = bounds
        middle = _as_float(_as_bits(low) + (_as_bits(high) - _as_bits(low)) // 2)
        at_middle = jnp.sum(jnp.where(below <= middle[:, None], weight(below), 0.0), axis=-1)
        nearer, further = jnp.stack([low, middle, at_low, at_middle]), jnp.stack([middle, high, at_middle, at_high])
        return jnp.where(is_open(bounds), jnp.where(at_middle >= target, nearer, further), bounds)

    # Start just below `low`. Where it is 0 the least positive number stands for it at the end.
    start = _as_float(jnp.maximum(_as_bits(low) - 1, 0))
    unknown = jnp.full_like(target, jnp.inf)
    bounds = jnp.stack([start, jnp.where(active, high, 0.0), -unknown, unknown])
    found = lax.while_loop(lambda bounds: jnp.any(is_open(bounds)), halve, bounds)[1]
    return jnp.where(active, found, otherwise)


def _as_float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _as_bits(values: Array) -> Array:
    return lax.bitcast_convert_type(jnp.abs(values), jnp.int32)  # -0.0 would be the least integer
