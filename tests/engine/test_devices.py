"""What devices say of themselves; NVML by a stand-in that knows the calls of nvidia-ml-py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.engine import devices


class Nvml(SimpleNamespace):
    """Four cards; the third is split, so that it has no share."""

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < 4:
            raise self.NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return {"GPU-b": 1, "MIG-c": 2}[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 2:
            raise self.NVMLError("not supported")
        return SimpleNamespace(gpu=[10, 35, 0, 100][handle])


class Gpu:
    platform = "gpu"

    def __init__(self, ordinal: int):
        self.local_hardware_id = ordinal

    def __str__(self) -> str:
        return f"cuda:{self.local_hardware_id}"


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices._nvml.cache_clear()
    yield
    devices._nvml.cache_clear()


@pytest.mark.parametrize(("visible", "expected"), [
    (None, {"cuda:0": 0.1, "cuda:1": 0.35}), ("", {"cuda:0": 0.1, "cuda:1": 0.35}),
    ("3, 1", {"cuda:0": 1.0, "cuda:1": 0.35}), ("GPU-b,0", {"cuda:0": 0.35, "cuda:1": 0.1}),
    ("MIG-c,3", {"cuda:1": 1.0}), ("3,9", {"cuda:0": 1.0})])
def test_the_right_card_is_asked(monkeypatch: pytest.MonkeyPatch, visible: str | None,
                                 expected: dict[str, float]) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus: Any = [Gpu(0), Gpu(1)]
    assert devices.utilization(gpus) == expected


def test_without_nvml_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Nvml) -> None:
        raise self.NVMLError("library not found")

    monkeypatch.setattr(Nvml, "nvmlInit", fail)
    gpus: Any = [Gpu(0)]
    assert devices.utilization(gpus) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    devices._nvml.cache_clear()
    assert devices.utilization(gpus) == {}
    assert devices.utilization(jax.devices()) == {} == devices.memory(jax.devices())
