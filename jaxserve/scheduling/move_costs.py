"""When it is cheaper to fetch computed keys and values from host memory than to compute them again."""

from __future__ import annotations

from dataclasses import dataclass

MOVE_BATCH = 8
"""Blocks that one program copies, in either direction; what is missing is padding."""


@dataclass(frozen=True, kw_only=True)
class MoveCosts:
    """What moving blocks and computing tokens take, as straight lines.

    Attributes:
      block_bytes: of a KV block in all layers, per device.
      token_flops: to compute one token, per device: 2 for each weight. Attention is left out, so recomputing long
        sequences looks cheaper than it is.
      link_bytes_per_s: between device and host, one way.
      flops_per_s: of a device in prefill.
      dispatch_s: the host's time to start one copy of `MOVE_BATCH` blocks.
    """

    block_bytes: int
    token_flops: float
    link_bytes_per_s: float
    flops_per_s: float
    dispatch_s: float = 2e-4

    def move_s(self, num_blocks: int) -> float:
        """Seconds to copy so many blocks one way."""
        return -(-num_blocks // MOVE_BATCH) * self.dispatch_s + num_blocks * self.block_bytes / self.link_bytes_per_s

    def compute_s(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens in steps that are full."""
        return num_tokens * self.token_flops / self.flops_per_s

    def swap_is_cheaper(self, *, num_blocks_out: int, num_blocks_back: int, num_tokens: int) -> bool:
        """The rule for a preempted request: copying its blocks out (those that the host has not yet) and back takes
        less time than to compute its tokens again."""
        return self.move_s(num_blocks_out) + self.move_s(num_blocks_back) < self.compute_s(num_tokens)

    def fetch_is_cheaper(self, *, num_blocks: int, num_tokens: int) -> bool:
        """The rule for blocks that the host has already."""
        return self.move_s(num_blocks) < self.compute_s(num_tokens)


RATES: dict[str, tuple[float, float]] = {"gpu": (2.5e10, 2e14), "cpu": (4e9, 5e10)}
"""Platform -> link_bytes_per_s, flops_per_s. Assumptions: PCIe 4.0 x16 as it is usually reached, and half of a current
card's dense bfloat16 peak; two cores of a CPU, where the link is its own memory."""
