"""Scales of an int8 KV cache: how large keys and values get, seen on sample tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.layers.attention import DenseBatch, HeadTransform
from jaxserve.runner.blueprint import Blueprint
from pallas_kernels.rope_kv_write import split_and_rotate

SAMPLE_TEXT = """\
The lighthouse keeper wrote 1,024 letters in 37 years; none was answered. "Why do you go on?" they asked him.
def area(width: float, height: float) -> float:
    return width * height  # in square metres
E = mc², ∑ 1/n² = π²/6. Les élèves étudient à l'école; 我们明天早上去北京; Москва — столица России.
| name | price |
|------|-------|
| tea  | $3.50 |
{"id": 17, "tags": ["a", "b"], "ok": true}
"""
HEADROOM = 1.25
"""Factor on the largest number seen: other texts may go further, and what lies beyond saturates."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Watched:
    """Causal attention over all rows that gives back, in place of the caches, the largest number of each KV head."""

    positions: jax.Array

    def attend(self, qkv: jax.Array, heads: HeadTransform, k_cache: Any, v_cache: Any, *, scale: float,
               window: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See `AttentionBatch.attend`."""
        _, k, v = split_and_rotate(qkv, heads.cos, heads.sin, q_norm=heads.q_norm, k_norm=heads.k_norm,
                                   epsilon=heads.epsilon)
        out, _, _ = DenseBatch(self.positions).attend(qkv, heads, None, None, scale=scale, window=window)
        largest = partial(jnp.max, axis=(0, 2))
        return out, largest(jnp.abs(k).astype(jnp.float32)), largest(jnp.abs(v).astype(jnp.float32))


Scales = Sequence[tuple[jax.Array, jax.Array]]
"""Per layer those of keys and of values, [K] float32."""


def scale_finder(blueprint: Blueprint) -> Callable[[Sequence[jax.Array], Sequence[int]], Scales]:
    """A function of the weights (as `Blueprint.leaves`) and the token ids of a sample text; compiled once."""
    @jax.jit
    def largest(leaves: Sequence[jax.Array], tokens: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(blueprint.mesh.abstract_mesh):
            positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            nothing = ((None, None),) * blueprint.model.num_layers
            _, seen = blueprint.decoder(leaves)(tokens, positions, nothing, _Watched(positions))
        return jax.tree.map(lambda number: jnp.maximum(number, 1e-6) * (HEADROOM / 127), seen)

    return lambda leaves, token_ids: largest(tuple(leaves), jnp.asarray(token_ids, jnp.int32))
