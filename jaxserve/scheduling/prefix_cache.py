"""Finding the blocks that hold a prompt's beginning already, by names that chain (as vLLM's prefix caching does)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from jaxserve.request import Request
from jaxserve.scheduling.block_pool import BlockPool


@dataclass
class PrefixCacheStats:
    """In tokens, since the engine was made.

    Attributes:
      queries: of the sequences that were looked up.
      hits: of those, how many were found.
    """

    queries: int = 0
    hits: int = 0


class PrefixCache:
    """Names full blocks by all tokens up to their end, so that equal beginnings have equal names.

    A name is a digest of the name before it and the block's own tokens; the first goes on from the request's salt and
    the version of the weights. A block is named when the step that fills it is planned: whoever shares it in the same
    step reads it after it was written, since each layer writes the whole step's keys before it reads any.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool):
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._pool, self._block_size = pool, block_size
        self._weights_version = 0

    def match(self, request: Request) -> list[int]:
        """Blocks that hold the request's first tokens; always at least one token is left to compute."""
        return self._pool.find(self.wanted(request))

    def wanted(self, request: Request) -> list[bytes]:
        """Names of the blocks that would save it work.

        With prompt log-probabilities there are none: every position has to be computed for them.
        """
        if not self._looks_up(request):
            return []
        return self._names(request, request.num_tokens)[: (request.num_tokens - 1) // self._block_size]

    def count(self, request: Request, num_cached: int) -> None:
        """A request starts with so many tokens found. Those that come back after a preemption do not count, nor those
        for which nothing is looked up."""
        if request.num_preemptions or not self._looks_up(request):
            return
        self.stats.queries += request.num_tokens
        self.stats.hits += num_cached
        request.num_cached_tokens = num_cached

    def uncount(self, request: Request) -> None:
        """It did not start after all."""
        if not request.num_preemptions and self._looks_up(request):
            self.stats.queries -= request.num_tokens
            self.stats.hits -= request.num_cached_tokens
            request.num_cached_tokens = 0

    def _looks_up(self, request: Request) -> bool:
        return self.enabled and request.params.prompt_logprobs is None

    def publish(self, request: Request) -> list[int]:
        """Names the blocks that the request's computed and known tokens fill; returns those that were not before."""
        full = min(request.num_computed_tokens, request.num_tokens) // self._block_size
        if not self.enabled or full <= request.num_published_blocks:
            return []
        names = self._names(request, full * self._block_size)
        fresh = [block_id for block_id, name in zip(request.block_ids[request.num_published_blocks : full],
                                                    names[request.num_published_blocks : full], strict=True)
                 if self._pool.name(block_id, name)]
        request.num_published_blocks = full
        return fresh

    def new_weights(self) -> None:
        """What is cached was computed with others: nothing of it is found any more. Requests must forget their
        names."""
        self._weights_version += 1

    def _names(self, request: Request, num_tokens: int) -> list[bytes]:
        """Of all full blocks of the first `num_tokens` tokens, and perhaps more."""
        names, size = request.block_names, self._block_size
        while (len(names) + 1) * size <= num_tokens:
            start = len(names) * size
            parent = names[-1] if names else f"{self._weights_version}:{request.cache_salt or ''}".encode()
            tokens = array("i", request.known_tokens(start, start + size)).tobytes()
            names.append(blake2b(parent + b"|" + tokens, digest_size=16).digest())
        return names
