"""Where arrays live: one mesh axis, "tensor", over which heads, MLP width and vocabulary are split (Megatron,
arXiv:1909.08053). A parameter's logical axes decide its sharding; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import MeshConfig
from jaxserve.errors import InvalidInputError
from jaxserve.parallel import TENSOR as TENSOR

_SHARDED_AXES = {"vocab", "kv_heads", "mlp", "table_width"}


def make_mesh(mesh: MeshConfig | Mesh) -> Mesh:
    """The device mesh of a config, or the user's own once it is known to have a "tensor" axis.

    Raises:
      InvalidInputError: more devices asked for than there are, or a mesh whose axes are not known.
    """
    if isinstance(mesh, Mesh):
        other = [name for name in mesh.axis_names if name != TENSOR and mesh.shape[name] > 1]
        if TENSOR not in mesh.axis_names or other:
            raise InvalidInputError("mesh", dict(mesh.shape), f'a mesh with one axis "{TENSOR}" (others of size 1)')
        return mesh
    if not isinstance(mesh, MeshConfig):
        raise InvalidInputError("mesh", mesh, "a MeshConfig or a jax.sharding.Mesh")
    devices = jax.devices()
    if mesh.tensor > len(devices):
        raise InvalidInputError("mesh.tensor", mesh.tensor, f"at most the {len(devices)} {devices[0].platform} devices")
    return Mesh(np.asarray(devices[: mesh.tensor]), (TENSOR,))


def param_sharding(mesh: Mesh, shape: Sequence[int], axes: Sequence[str | None]) -> NamedSharding:
    """The sharding of a parameter with these logical axes. A vocabulary that does not divide is replicated."""
    size = mesh.shape[TENSOR]
    pairs = zip(shape, axes, strict=True)
    spec = [TENSOR if axis in _SHARDED_AXES and dim % size == 0 else None for dim, axis in pairs]
    return NamedSharding(mesh, PartitionSpec(*spec))


def cache_sharding(mesh: Mesh) -> NamedSharding:
    """[B, P, K, H], split over the KV heads."""
    return NamedSharding(mesh, PartitionSpec(None, None, TENSOR, None))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
