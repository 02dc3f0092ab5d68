"""Bytes of a step, from the step itself: traced, and compiled for the card, in processes of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.errors import InvalidInputError, OutOfMemoryError
from jaxserve.files import write_whole
from jaxserve.fingerprint import compiler_versions, digest, sources, step_sources
from jaxserve.targets.target import get_target

WORKER_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""Of processes that compile for GPUs: JAX's CUDA plugin would look for some otherwise."""


_MEASURING = ("jaxserve/planning/measure.py", "jaxserve/targets")


@dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
      config: resolved options; its mesh is not read.
      target: the card's name.
    """

    model: ModelConfig
    config: EngineConfig
    target: str
    tensor_parallel_size: int

    @property
    def key(self) -> str:
        """The same for everything that would be measured the same."""
        options = {**asdict(self.config), "mesh": self.tensor_parallel_size}
        model = {**asdict(self.model), "hf_config": None}
        return digest([model, options, self.target, get_target(self.target).config_text, step_sources(),
                       sources(_MEASURING), compiler_versions()])


@dataclass(frozen=True)
class StepBytes:
    """All per device.

    Attributes:
      weights: of all parameters.
      read_weights: of those that every step reads: all but the rows of an embedding table that is only looked up in.
      block: of one KV block, keys and values of all layers.
      state: what is kept from step to step besides the cache: the sampler's rows.
      temporaries: what the largest step takes besides its arguments, by the compiler's account.
      compile_s: seconds.
    """

    weights: int
    read_weights: int
    block: int
    state: int
    temporaries: int
    compile_s: float


def measure_all(requests: Sequence[Request], *, on_done: Callable[[], None] = lambda: None) -> list[StepBytes | str]:
    """Measures each; what was measured before, by the same sources and versions, is read from a cache.

    Args:
      on_done: called after each.

    Returns:
      For each request its bytes, or why the compiler cannot make its step.
    """
    found: dict[Request, StepBytes | str | None] = {request: _read_cached(request) for request in requests}
    missing = [request for request, known in found.items() if known is None]
    for _ in range(len(requests) - len(missing)):
        on_done()
    if missing:
        from loky import ProcessPoolExecutor  # its processes do not import the caller's __main__

        workers = min(os.cpu_count() or 1, len(missing))
        with ProcessPoolExecutor(workers, env=WORKER_ENVIRONMENT) as pool:
            futures = {pool.submit(measure, request): request for request in missing}
            for future in as_completed(futures):
                try:
                    found[futures[future]] = measured = future.result()
                    _write_cached(futures[future], measured)
                except (NotImplementedError, InvalidInputError, OutOfMemoryError) as error:
                    found[futures[future]] = str(error)
                on_done()
    return [known for request in requests if (known := found[request]) is not None]


def measure(request: Request) -> StepBytes:
    """Measures in this process, which must not have started JAX for GPUs."""
    import jax.numpy as jnp

    from jaxserve.models.params import abstract_params
    from jaxserve.runner.blueprint import blueprint
    from jaxserve.runner.kv_cache import block_bytes
    from jaxserve.runner.memory import param_bytes, state_bytes, temp_bytes
    from jaxserve.targets.compiling import compile_lowered, lowering_for

    model, config, ranks = request.model, request.config, request.tensor_parallel_size
    target = get_target(request.target)
    mesh = target.mesh(ranks)
    start = time.monotonic()
    params = param_bytes(abstract_params(model, tensor_parallel_size=ranks, dtype=jnp.dtype(config.dtype)), mesh)
    looked_up = 0 if model.tie_word_embeddings else params["embed.weight"]
    steps = blueprint(shallow(model), config, mesh)
    with lowering_for(target, mesh):
        lowered = steps.lower(steps.buckets.mixed[-1])
    temporaries = temp_bytes(compile_lowered(lowered, target))
    block = block_bytes(replace(steps.cache, num_layers=model.num_layers)) // ranks
    return StepBytes(sum(params.values()), sum(params.values()) - looked_up, block, state_bytes(steps), temporaries,
                     time.monotonic() - start)


def shallow(model: ModelConfig) -> ModelConfig:
    """The model with two layers of each kind: layers take turns in the same temporaries, so more would add none."""
    windows = [window for kind in dict.fromkeys(model.layer_windows)
               for window in [kind] * min(2, model.layer_windows.count(kind))]
    return replace(model, num_layers=len(windows), layer_windows=tuple(windows))


def _cache_file(request: Request) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxserve" / "plan" / f"{request.key}.json"


def _read_cached(request: Request) -> StepBytes | None:
    try:
        return StepBytes(**json.loads(_cache_file(request).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_cached(request: Request, found: StepBytes) -> None:
    file = _cache_file(request)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(asdict(found)).encode())
    except OSError:
        return  # it will be measured again
