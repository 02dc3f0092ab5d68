"""Products that XLA's partitioner must not split by itself: every rank runs one on its own part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.layers.linear import Axes
from jaxserve.parallel import TENSOR, tensor_parallel_size

SPLIT_AXES = ("kv_heads", "mlp")
"""Logical axes of projections' features that are split over the ranks."""

Product = Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]


def product_on_ranks(product: Product, x: jax.Array, params: Mapping[str, nnx.Param | None], *, in_axes: Axes,
                     out_axes: Axes) -> jax.Array:
    """The product and its bias. On more than one rank: in shard_map, so that kernels see their rank's part only.

    Args:
      product: takes [T, in...] and arrays by name, each a rank's part; gives [T, out...]. It adds the "bias" if it is
        given one.
      x: [T, in...].
      params: the product's arrays; of "bias", the axes are `out_axes`.
      in_axes, out_axes: logical names of the features' axes.

    Returns:
      [T, out...], split as `out_axes` say. Where x is split, the ranks' products are summed: one all-reduce in the
      product's dtype, and nothing else travels.
    """
    given = {name: param for name, param in params.items() if param is not None}
    arrays = {name: param.get_value() for name, param in given.items()}
    if tensor_parallel_size() == 1:
        return product(x, arrays)
    specs = {name: _spec(param.get_metadata("axes")) for name, param in given.items()}
    is_summed = any(axis in SPLIT_AXES for axis in in_axes)

    def on_rank(x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        if not is_summed:
            return product(x, arrays)
        bias = arrays.get("bias")  # added once, not on every rank
        y = jax.lax.psum(product(x, {name: array for name, array in arrays.items() if name != "bias"}), TENSOR)
        return y if bias is None else (y + bias).astype(y.dtype)

    on_ranks: Any = jax.shard_map(on_rank, in_specs=(_spec((None, *in_axes)), specs),
                                  out_specs=_spec((None, *out_axes)), check_vma=False)
    return on_ranks(x, arrays)


def _spec(axes: Axes) -> PartitionSpec:
    return PartitionSpec(*(TENSOR if axis in SPLIT_AXES else None for axis in axes))
