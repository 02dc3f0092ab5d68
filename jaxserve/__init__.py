"""jaxserve: an LLM serving engine in JAX for NVIDIA GPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.driver import use_cpu_without_driver

if TYPE_CHECKING:
    from jaxserve.beam_search import BeamSearchParams as BeamSearchParams
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.config import MeshConfig as MeshConfig
    from jaxserve.engine.async_llm import AsyncLLM as AsyncLLM
    from jaxserve.llm import LLM as LLM
    from jaxserve.llm import generate as generate
    from jaxserve.planning.planner import Plan as Plan
    from jaxserve.planning.planner import plan as plan
    from jaxserve.planning.planner import plan_all as plan_all
    from jaxserve.request import CompletionOutput as CompletionOutput
    from jaxserve.request import RequestOutput as RequestOutput
    from jaxserve.request import RequestOutputKind as RequestOutputKind
    from jaxserve.request import SamplingParams as SamplingParams
    from jaxserve.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxserve.llm", "generate": "jaxserve.llm", "AsyncLLM": "jaxserve.engine.async_llm",
    "BeamSearchParams": "jaxserve.beam_search", "SamplingParams": "jaxserve.request",
    "StructuredOutputsParams": "jaxserve.structured_outputs",
    "RequestOutput": "jaxserve.request", "CompletionOutput": "jaxserve.request",
    "RequestOutputKind": "jaxserve.request", "MeshConfig": "jaxserve.config",
    "EngineConfig": "jaxserve.config", "plan": "jaxserve.planning.planner",
    "plan_all": "jaxserve.planning.planner", "Plan": "jaxserve.planning.planner",
}
__all__ = [*_HOMES, "__version__"]

use_cpu_without_driver()


def __getattr__(name: str) -> Any:
    # Names are imported when first used, so that `jaxserve --help` and the jax-free parts need no jax.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
