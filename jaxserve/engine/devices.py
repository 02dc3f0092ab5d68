"""What the devices say of themselves while they serve."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax


def memory(devices: Iterable[jax.Device]) -> dict[str, dict[str, int]]:
    """Device -> what it says of its memory, such as bytes_in_use; without devices that say nothing, as CPUs."""
    return {str(device): stats for device in devices if (stats := device.memory_stats())}


def utilization(devices: Iterable[jax.Device]) -> dict[str, float]:
    """Device -> share of the last moments, 0 to 1, in which it computed; as NVML says, so without what is no GPU, or
    where NVML is not (the driver's library, or nvidia-ml-py)."""
    gpus = [device for device in devices if device.platform == "gpu"]
    nvml = _nvml() if gpus else None
    if nvml is None:
        return {}
    found = {}
    for gpu in gpus:
        try:
            handle = _handle(nvml, gpu.local_hardware_id)
            found[str(gpu)] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError:
            continue  # a part of a card (MIG) has none
    return found


@cache
def _nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(nvml: Any, ordinal: int) -> Any:
    """Of the process's n-th GPU. NVML counts all of the machine, in the order of their PCI addresses; CUDA counts those
    that CUDA_VISIBLE_DEVICES names, by number or UUID (and fastest first, where cards differ, unless
    CUDA_DEVICE_ORDER=PCI_BUS_ID)."""
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[ordinal] if ordinal < len(visible) else str(ordinal)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
