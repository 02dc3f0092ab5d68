"""The least time that a step can take: what must be moved over what the card can move, what must be computed over what
it can compute (Williams et al. 2009, doi:10.1145/1498765.1498785). No program is faster; ours may well be slower."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.planning.measure import StepBytes
from jaxserve.targets.target import Target


@dataclass(frozen=True)
class Bound:
    """Attributes:
      seconds: at least.
      limit: what takes so long: "memory", "compute" or "links" (all-reduces between the cards).
    """

    seconds: float
    limit: str


@dataclass(frozen=True)
class Roofline:
    """Of one model on some cards, its weights and cache stored in a certain way."""

    model: ModelConfig
    target: Target
    tensor_parallel_size: int
    block_size: int
    step: StepBytes

    def decode(self, context: int, batch: int) -> Bound:
        """A step of `batch` sequences of `context` tokens each, one new token a sequence."""
        return self.bound(batch, batch, self._kv_bytes(context) * batch, self._seen(context) * batch)

    def prefill(self, prompt: int, chunk: int) -> Bound:
        """The steps of one prompt, `chunk` tokens at a time, up to its first output token."""
        steps: list[Bound] = []
        done = 0
        while done < prompt:
            rows = min(chunk, prompt - done)
            first, last = self._seen(done + 1), self._seen(done + rows)
            is_last = done + rows == prompt
            steps.append(self.bound(rows, int(is_last), self._kv_bytes(done + rows), rows * (first + last) / 2))
            done += rows
        return Bound(sum(step.seconds for step in steps), max(steps, key=lambda step: step.seconds).limit)

    def bound(self, rows: int, sampled: int, kv_bytes: float, seen: float) -> Bound:
        """Of any step.

        Args:
          rows: tokens that go through the layers; sampled: those that go through the output head.
          kv_bytes: read of the cache, per device.
          seen: keys that the rows' queries meet, summed over rows and layers.
        """
        model, ranks = self.model, self.tensor_parallel_size
        hidden, heads = model.hidden_size, model.num_heads * model.head_dim
        attention = hidden * (2 * heads + 2 * model.num_kv_heads * model.head_dim)
        projections = model.num_layers * (attention + 3 * hidden * model.intermediate_size)
        slow = 2 * sampled * model.vocab_size * hidden + 4 * heads * seen
        is_fp8 = model.quantization is not None and model.quantization.kind == "fp8"
        peak = (self.target.fp8_flops if is_fp8 else None) or self.target.bf16_flops
        seconds = {
            "memory": (self.step.read_weights + kv_bytes) / self.target.bandwidth_bytes_per_s,
            "compute": (2 * rows * projections / peak + slow / self.target.bf16_flops) / ranks,
            # Two all-reduces a layer of 2-byte rows. A card must receive (n - 1) / n of each at least, as where the
            # switch adds; a ring needs twice that.
            "links": 2 * model.num_layers * (ranks - 1) / ranks * rows * hidden * 2
            / (self.target.link_bytes_per_s / 2),
        }
        limit = max(seconds, key=seconds.__getitem__)
        return Bound(seconds[limit], limit)

    def _seen(self, context: int) -> int:
        """Keys that a query at the end of the context meets, over all layers."""
        return sum(min(context, window or context) for window in self.model.layer_windows)

    def _kv_bytes(self, context: int) -> float:
        """Of the keys and values of one sequence, per device."""
        return self._seen(context) * self.step.block / (self.block_size * self.model.num_layers)
