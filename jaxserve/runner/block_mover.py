"""Copies KV blocks between device and host, as a plan says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.host_blocks import CompressedBlocks, HostBlocks, PinnedBlocks
from jaxserve.runner.kv_cache import Caches, ScaledCache, parts
from jaxserve.runner.sharding import cache_sharding
from jaxserve.scheduling.move_costs import MOVE_BATCH
from jaxserve.scheduling.plan import StepPlan

MOST_AHEAD = 4
"""Batches that may be on their way to the host before the next one waits: they take device memory until they are
there."""

STAGING_BLOCKS = 2 * MOST_AHEAD * MOVE_BATCH
"""Blocks of device memory that copies in both directions take at most."""


class BlockMover:
    """Two programs that take `MOVE_BATCH` blocks, padded with the null block: out of the caches, all layers' keys and
    values of a block as one array, and into them, in place.

    Nothing here waits for the device, but for copies that are needed or of which too many are on their way. The device
    runs programs in order, so a block is read before any later step writes to it.
    """

    def __init__(self, blueprint: Blueprint, *, compress: bool):
        cache = blueprint.cache
        sharding = cache_sharding(blueprint.mesh)
        block = jax.ShapeDtypeStruct((2 * cache.num_layers, *cache.shape[1:]), cache.dtype)
        self.host: HostBlocks = CompressedBlocks(sharding, block) if compress else PinnedBlocks(sharding)
        self._leaving: deque[Sequence[int]] = deque()
        self._take: Any = jax.jit(_take, out_shardings=(sharding,) * MOVE_BATCH)
        self._set: Any = jax.jit(_set, donate_argnums=0,
                                 out_shardings=jax.tree.map(lambda leaf: leaf.sharding, blueprint.state.caches))

    def run(self, caches: Caches, plan: StepPlan) -> Caches:
        """The caches with the plan's copies under way."""
        for block_ids, host_ids in _batches(plan.swap_out):
            if len(self._leaving) == MOST_AHEAD:
                self.host.wait(self._leaving.popleft())
            self.host.put(host_ids, self._take(caches, _padded(block_ids))[: len(host_ids)])
            self._leaving.append(host_ids)
        for block_ids, host_ids in _batches(plan.swap_in):
            blocks = self.host.get(host_ids)
            blocks += blocks[:1] * (MOVE_BATCH - len(blocks))
            caches = self._set(caches, _padded(block_ids), blocks)
        return caches

    def warm_up(self, caches: Caches) -> Caches:
        """Compiles both programs; the caches hold the same as before."""
        warm: Caches = self._set(caches, _padded([]), list(self._take(caches, _padded([]))))
        return warm

    def close(self) -> None:
        self.host.close()


def _take(caches: Caches, block_ids: jax.Array) -> tuple[jax.Array, ...]:
    """[2L, P, K, H] of each of the blocks [MOVE_BATCH]."""
    taken = jnp.stack([parts(cache)[0][block_ids] for layer in caches for cache in layer])
    return tuple(taken[:, index] for index in range(MOVE_BATCH))


def _set(caches: Caches, block_ids: jax.Array, blocks: list[jax.Array]) -> Caches:
    """Caches with these blocks' content. Padding writes to the null block, where nobody reads."""
    new = iter(jnp.stack(blocks, axis=1))

    def changed(cache: Any) -> Any:
        values, scale = parts(cache)
        values = values.at[block_ids].set(next(new))
        return values if scale is None else ScaledCache(values, scale)

    return tuple((changed(k_cache), changed(v_cache)) for k_cache, v_cache in caches)


def _batches(moves: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    for start in range(0, len(moves), MOVE_BATCH):
        batch = moves[start : start + MOVE_BATCH]
        yield [block_id for block_id, _ in batch], [host_id for _, host_id in batch]


def _padded(block_ids: Sequence[int]) -> np.ndarray:
    padded = np.zeros(MOVE_BATCH, np.int32)
    padded[: len(block_ids)] = block_ids
    return padded
