"""The plans that the tests look at, compiled once, side by side."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.planning.known import read_model
from jaxserve.planning.planner import Plan, _config, _plans, _request

ASKED: dict[str, dict[str, Any]] = {
    "8B bf16": dict(model="Llama-3.1-8B", target="a10g"),
    "8B int4": dict(model="Llama-3.1-8B", target="a10g", quantization="int4"),
    "8B int4, int8 KV": dict(model="Llama-3.1-8B", target="a10g", quantization="int4", kv_cache_dtype="int8"),
    "70B on 4": dict(model="Llama-3.1-70B", target="h100", ranks=4),
    "70B on 2": dict(model="Llama-3.1-70B", target="h200", ranks=2),
    "405B fp8": dict(model="Llama-3.1-405B", target="h200", ranks=8, quantization="fp8"),
}


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """Of `ASKED`, measured afresh."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        requests = []
        for asked in ASKED.values():
            config = _config(kv_cache_dtype=asked.get("kv_cache_dtype", "auto"))
            model = read_model(asked["model"], asked.get("quantization"))
            requests.append(_request(model, asked["target"], asked.get("ranks", 1), config))
        found = _plans(requests, lambda: None)
    for plan in found:
        assert isinstance(plan, Plan), plan.reason
    return dict(zip(ASKED, found, strict=True))  # type: ignore[arg-type]
