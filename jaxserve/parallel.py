"""What a model needs to know of the mesh that it is traced for. Outside of a mesh all of this does nothing.

Weights say by their sharding where they live, and XLA derives the rest. Two places know better than XLA what should
travel between devices: they ask here. The mesh is JAX's own context (`jax.sharding.use_abstract_mesh`).
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

TENSOR = "tensor"
"""The mesh axis over which heads, MLP width and vocabulary are split."""


def tensor_parallel_size() -> int:
    """Devices over which the program that is being traced is split."""
    return jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)


def replicate(x: jax.Array) -> jax.Array:
    """The whole of `x` on every device: where it is split, one all-gather, here and not later."""
    if tensor_parallel_size() == 1:
        return x
    # Row-major, or XLA:GPU would leave it as the exchange brings it, and reductions over rows could not be fused.
    return with_layout_constraint(jax.lax.with_sharding_constraint(x, PartitionSpec()), Layout(tuple(range(x.ndim))))
