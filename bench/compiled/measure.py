"""What a compiled step costs: kernels by layer, copies, collectives, bytes against the unavoidable."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.compiled.lowering import Step
from jaxserve.targets import CompiledProgram, Kernel
from jaxserve.targets.traffic import Moved, Paged, Traffic

_LEAF = re.compile(r"leaves\[(\d+)\]")
_DECODE = "attention_decode"
_CACHE = re.compile(r"state\.caches\[(\d+)\]\[([01])\]")


@dataclass(frozen=True)
class Launch:
    """One kernel of the step and what it moves.

    Attributes:
      layer: number of the decoder layer it belongs to, None outside.
      weights: paths of the parameters it reads.
    """

    kernel: Kernel
    moved: Moved
    times: int
    layer: int | None
    weights: tuple[str, ...]


class Measured:
    """A step's program, measured. Everything is per device."""

    def __init__(self, step: Step, program: CompiledProgram):
        self.step, self.program = step, program
        self._paths = list(step.params)
        self.traffic = Traffic(program, self._paged)

    @cached_property
    def launches(self) -> list[Launch]:
        """Every kernel that runs, in order, with its layer.

        A layer begins with the first kernel that reads one of its weights, and ends where the next begins.
        """
        found = []
        layer: int | None = None
        for kernel, times in self.traffic.running():
            weights = self._weights(kernel)
            layers = [int(path.split(".")[1]) for path in weights if path.startswith("layers.")]
            if layers:
                layer = max(layers)
            elif weights:
                layer = None
            found.append(Launch(kernel, self.traffic.of(kernel), times, layer, tuple(weights)))
        return found

    @cached_property
    def layer_counts(self) -> list[int]:
        """Launches in each layer."""
        counts = Counter(launch.layer for launch in self.launches for _ in range(launch.times))
        return [counts[layer] for layer in range(self.step.model.num_layers)]

    @property
    def representative_layer(self) -> list[Launch]:
        """Of the layer in the middle: the ends may hold what is only done once."""
        return [launch for launch in self.launches if launch.layer == self.step.model.num_layers // 2]

    @property
    def outside(self) -> list[Launch]:
        """Kernels of no layer: embedding, last norm, logits, sampling."""
        return [launch for launch in self.launches if launch.layer is None]

    @cached_property
    def copies(self) -> list[tuple[Kernel, str]]:
        """(kernel, what) of every kernel anywhere in the program, run or not, that copies a cache array or a weight."""
        return [(kernel, what) for kernel in self.program.kernels
                for argument in self.traffic.copied(kernel) if (what := self._name(argument))]

    @property
    def cache_copies(self) -> list[tuple[Kernel, str]]:
        return [copy for copy in self.copies if copy[1].startswith("cache")]

    @property
    def weight_copies(self) -> list[tuple[Kernel, str]]:
        return [copy for copy in self.copies if not copy[1].startswith("cache") and not copy[1].endswith(".scales")]

    @property
    def weight_bytes(self) -> int:
        """Of the weights that every step must read: all but the embedding, of which it reads a few rows, unless that
        is the output projection too."""
        tied = self.step.model.tie_word_embeddings
        return sum(self.step.param_bytes(path) for path in self._paths if tied or not path.startswith("embed."))

    @property
    def live_kv_bytes(self) -> int:
        """Keys and values of the sequences' contexts, in all layers, as far as windows reach."""
        return sum(2 * sum(self._live_bytes(layer)) for layer in range(self.step.model.num_layers))

    @property
    def unavoidable_bytes(self) -> int:
        """Weights once and live KV once."""
        return self.weight_bytes + self.live_kv_bytes

    @property
    def product_bytes(self) -> int:
        """Moved by the matrix products besides weights: their inputs, outputs and residuals. Small in decode steps."""
        weights = sum(self.step.param_bytes(path) for launch in self._products for path in launch.weights)
        return sum(launch.moved.num_bytes for launch in self._products) - weights

    @property
    def argument_bytes(self) -> int:
        """What the arguments should take: weights, cache, and what the sampler keeps per request."""
        weights = sum(self.step.param_bytes(path) for path in self._paths)
        caches = 2 * self.step.model.num_layers * self.step.cache_array_bytes
        rows = len(self.step.context_lens) + 1
        return weights + caches + 7 * rows * self.step.model.vocab_size

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        total, memory = self.traffic.total, self.program.memory
        return {
            "bucket": str(self.step.bucket), "devices": self.step.mesh.size,
            "kernels_per_layer": self.layer_counts, "kernels_outside": sum(launch.times for launch in self.outside),
            "open_loops": self.traffic.open_loops,
            "layer": [_launch_json(launch) for launch in self.representative_layer],
            "cache_copies": [f"{kernel.name}: {what}" for kernel, what in self.cache_copies],
            "weight_copies": [f"{kernel.name}: {what}" for kernel, what in self.weight_copies],
            "collectives": [dict(name=launch.kernel.name, layer=launch.layer, bytes=launch.kernel.output_bytes,
                                 op_name=launch.kernel.op_name) for launch in self.collectives],
            "moved_bytes": total.num_bytes, "read_bytes": total.read_bytes, "written_bytes": total.written_bytes,
            "unavoidable_bytes": self.unavoidable_bytes, "weight_bytes": self.weight_bytes,
            "live_kv_bytes": self.live_kv_bytes, "product_bytes": self.product_bytes,
            "moved_over_unavoidable": total.num_bytes / self.unavoidable_bytes,
            "argument_bytes": memory.argument_bytes, "argument_bytes_by_hand": self.argument_bytes,
            "output_bytes": memory.output_bytes, "alias_bytes": memory.alias_bytes, "temp_bytes": memory.temp_bytes,
            "compile_s": self.program.compile_s,
            "resources": [vars(used) for used in self.program.resources() or []],
        }

    @property
    def collectives(self) -> list[Launch]:
        """Those that run, in order."""
        return [launch for launch in self.launches if launch.kernel.kind == "collective"]

    @property
    def _products(self) -> Sequence[Launch]:
        return [launch for launch in self.launches if launch.kernel.kind in ("gemm", "pallas", "mosaic")
                and any(len(self.step.params[path].shape) > 1 for path in launch.weights)]

    def _paged(self, kernel: Kernel, argument: str) -> Paged | None:
        match = _CACHE.fullmatch(argument)
        if match is None:
            return None
        decodes, chunk = self._live_bytes(int(match[1]))
        read = decodes + chunk
        if chunk and self._decodes_apart:
            read = decodes if _DECODE in kernel.name else chunk
        return Paged(read, self.step.kv_bytes(self.step.bucket.num_tokens))

    @cached_property
    def _decodes_apart(self) -> bool:
        """Whether a mixed step's decoding sequences have a kernel for themselves, which reads nothing of the chunk."""
        return any(_DECODE in kernel.name for kernel in self.program.pallas_kernels)

    def _live_bytes(self, layer: int) -> tuple[int, int]:
        """Of the keys that the decoding sequences and the chunk see."""
        window = self.step.model.layer_windows[layer]
        lens = self.step.context_lens
        # The chunk's first tokens see all before them, so its context is read whole however small the window.
        chunk = 0 if self.step.bucket.is_decode else lens[-1]
        decodes = lens if self.step.bucket.is_decode else lens[:-1]
        return self.step.kv_bytes(sum(min(length, window or length) for length in decodes)), self.step.kv_bytes(chunk)

    def _weights(self, kernel: Kernel) -> list[str]:
        matches = [_LEAF.fullmatch(argument) for argument in self.traffic.arguments(kernel)]
        return [self._paths[int(match[1])] for match in matches if match]

    def _name(self, argument: str) -> str:
        if match := _CACHE.fullmatch(argument):
            return f"cache of layer {match[1]}, {'keys' if match[2] == '0' else 'values'}"
        match = _LEAF.fullmatch(argument)
        return self._paths[int(match[1])] if match else ""


def _launch_json(launch: Launch) -> dict[str, Any]:
    kernel = launch.kernel
    return dict(name=kernel.name, kind=kernel.kind, grid=kernel.grid, threads=kernel.threads, within=kernel.within,
                op_name=kernel.op_name, read_bytes=launch.moved.read_bytes, written_bytes=launch.moved.written_bytes,
                weights=launch.weights)
