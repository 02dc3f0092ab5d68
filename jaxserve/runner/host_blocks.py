"""What KV blocks hold while they lie in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding


class HostBlocks(Protocol):
    """Host block -> its content, an array [2L, P, K, H] on its way to or from the device.

    Attributes:
      compression_ratio: bytes that were put divided by bytes kept for them, since the engine was made; 1 uncompressed.
    """

    @property
    def compression_ratio(self) -> float: ...

    def put(self, host_ids: Sequence[int], blocks: Sequence[jax.Array]) -> None:
        """Starts copying blocks away from the device, in place of what these held before."""

    def get(self, host_ids: Sequence[int]) -> list[jax.Array]:
        """Starts copying blocks to the device; waits for what is still on its way from there."""

    def wait(self, host_ids: Sequence[int]) -> None:
        """Until these have left the device."""

    def close(self) -> None: ...


class PinnedBlocks:
    """In page-locked memory, which the device reaches by itself.

    Args:
      sharding: of a block on the device.
    """

    compression_ratio = 1.0

    def __init__(self, sharding: NamedSharding):
        self._on_device, self._on_host = sharding, sharding.with_memory_kind("pinned_host")
        self._blocks: dict[int, jax.Array] = {}

    def put(self, host_ids: Sequence[int], blocks: Sequence[jax.Array]) -> None:
        self._blocks.update(zip(host_ids, jax.device_put(list(blocks), self._on_host), strict=True))

    def get(self, host_ids: Sequence[int]) -> list[jax.Array]:
        found: list[jax.Array] = jax.device_put([self._blocks[host_id] for host_id in host_ids], self._on_device)
        return found

    def wait(self, host_ids: Sequence[int]) -> None:
        jax.block_until_ready([self._blocks[host_id] for host_id in host_ids])

    def close(self) -> None:
        self._blocks.clear()


class CompressedBlocks:
    """In ordinary memory, as LZ4 frames of the bytes sorted by their place in a number, so that what numbers have in
    common, sign and exponent, comes together. A thread compresses while steps go on.

    Args:
      sharding: of a block on the device.
      block: its shape and dtype.
    """

    def __init__(self, sharding: NamedSharding, block: jax.ShapeDtypeStruct):
        import lz4.frame  # few engines need it

        self._lz4 = lz4.frame
        self._sharding, self._shape, self._dtype = sharding, block.shape, np.dtype(block.dtype)
        self._blocks: dict[int, Future[bytes]] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jaxserve-compress")
        self._num_raw_bytes = self._num_kept_bytes = 0

    @property
    def compression_ratio(self) -> float:
        return self._num_raw_bytes / self._num_kept_bytes if self._num_kept_bytes else 1.0

    def put(self, host_ids: Sequence[int], blocks: Sequence[jax.Array]) -> None:
        for host_id, block in zip(host_ids, blocks, strict=True):
            block.copy_to_host_async()
            self._blocks[host_id] = self._executor.submit(self._compress, block)

    def get(self, host_ids: Sequence[int]) -> list[jax.Array]:
        blocks = [self._decompress(self._blocks[host_id].result()) for host_id in host_ids]
        found: list[jax.Array] = jax.device_put(blocks, self._sharding)
        return found

    def wait(self, host_ids: Sequence[int]) -> None:
        for host_id in host_ids:
            self._blocks[host_id].result()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._blocks.clear()

    def _compress(self, block: jax.Array) -> bytes:
        by_number = np.ascontiguousarray(np.asarray(block)).view(np.uint8).reshape(-1, self._dtype.itemsize)
        kept: bytes = self._lz4.compress(np.ascontiguousarray(by_number.T).tobytes())
        self._num_raw_bytes += by_number.size
        self._num_kept_bytes += len(kept)
        return kept

    def _decompress(self, kept: bytes) -> np.ndarray:
        by_place = np.frombuffer(self._lz4.decompress(kept), np.uint8).reshape(self._dtype.itemsize, -1)
        return np.ascontiguousarray(by_place.T).view(self._dtype).reshape(self._shape)
