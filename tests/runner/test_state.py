"""The state an engine begins with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import MeshConfig
from jaxserve.runner.kv_cache import CacheSpec
from jaxserve.runner.sharding import make_mesh
from jaxserve.runner.state import abstract_state, zeros_like


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_zeros_of_its_own(dtype: str) -> None:
    spec = CacheSpec(num_layers=2, num_blocks=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.dtype(dtype))
    wanted = abstract_state(spec, 5, 40, make_mesh(MeshConfig()))
    made = zeros_like(wanted)
    structures = [str(jax.tree.structure(each)) for each in (made, wanted)]
    assert structures[0] == structures[1]
    for array, leaf in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        assert (array.shape, array.dtype, array.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
        assert not np.asarray(array).any()
    places = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(made) if array.size]
    assert len(set(places)) == len(places), "arrays share memory"
