"""The compiled steps, one for each bucket, compiled when first needed or all at once in warm-up."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from jax.stages import Compiled

from jaxserve import compat
from jaxserve.errors import ExecutablesError
from jaxserve.executables.load import Executables
from jaxserve.runner.blueprint import Blueprint
from jaxserve.runner.buckets import Bucket

logger = logging.getLogger(__name__)


class Programs:
    """Makes steps, by compiling or loading them, in a few threads and keeps them.

    Args:
      executables: where steps come from instead of the compiler; known to be for this blueprint.

    Attributes:
      num_compiled: programs asked for so far, ready or being made: warm-up raises it, nothing after may.
    """

    def __init__(self, blueprint: Blueprint, executables: Executables | None = None):
        self._blueprint, self._executables = blueprint, executables
        self._programs: dict[Bucket, Future[Compiled]] = {}
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="jaxserve-compile")

    @property
    def num_compiled(self) -> int:
        return len(self._programs)

    def prefetch(self, buckets: Iterable[Bucket]) -> None:
        """Starts making these in the background."""
        for bucket in buckets:
            self._future(bucket)

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether `get` would return at once."""
        future = self._programs.get(bucket)
        return future is not None and future.done()

    def is_begun(self, bucket: Bucket) -> bool:
        """Whether it was asked for."""
        return bucket in self._programs

    def texts(self) -> dict[Bucket, str]:
        """The optimised HLO of every program that is ready."""
        ready = {bucket: future.result() for bucket, future in self._programs.items() if future.done()}
        return {bucket: program.as_text() or "" for bucket, program in ready.items()}

    def get(self, bucket: Bucket) -> Compiled:
        """The bucket's program; waits for it if it is not ready."""
        return self._future(bucket).result()

    def wait(self) -> None:
        """Waits for all that were asked for."""
        for future in list(self._programs.values()):
            future.result()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _future(self, bucket: Bucket) -> Future[Compiled]:
        with self._lock:
            if bucket not in self._programs:
                self._programs[bucket] = self._executor.submit(self._make, bucket)
            return self._programs[bucket]

    def _make(self, bucket: Bucket) -> Compiled:
        start = time.monotonic()
        if self._executables is not None:
            try:
                program = self._executables.load(bucket, self._blueprint)
            except ExecutablesError as error:
                logger.warning("%s; compiling %s as usual", error, bucket)
            else:
                logger.info("took %s from its file in %.1f s", bucket, time.monotonic() - start)
                return program
        program = self._blueprint.lower(bucket).compile()
        compat.return_freed_memory()
        logger.info("compiled %s in %.1f s", bucket, time.monotonic() - start)
        return program
