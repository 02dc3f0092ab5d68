"""The cards' facts, their meshes, and what is said where something is missing."""

import subprocess
import sys
from importlib import resources

import pytest

from jaxserve.targets import TARGETS, get_target

# NVIDIA's data sheets: compute capability, multiprocessors, memory in GB, bandwidth in GB/s, L2 in MB.
DATA_SHEETS = {
    "a100": ((8, 0), 108, 80, 2039, 40),
    "a10g": ((8, 6), 80, 24, 600, 6),
    "l4": ((8, 9), 58, 24, 300, 48),
    "rtx4090": ((8, 9), 128, 24, 1008, 72),
    "h100": ((9, 0), 132, 80, 3350, 50),
    "h200": ((9, 0), 132, 141, 4800, 60),
    "b200": ((10, 0), 148, 180, 8000, 126),
}


@pytest.mark.parametrize("name", TARGETS)
def test_facts(name):
    target = get_target(name)
    capability, num_sms, memory_gb, bandwidth_gb_per_s, l2_mb = DATA_SHEETS[name]
    assert (target.name, target.compute_capability, target.num_sms) == (name, capability, num_sms)
    assert 0.95 < target.memory_bytes / (memory_gb * 1e9) < 1.08  # some sheets mean 10^9, some 2^30
    assert target.bandwidth_bytes_per_s == bandwidth_gb_per_s * 10**9
    assert target.l2_bytes == l2_mb * 2**20
    # CUDA keeps one KB of a multiprocessor's shared memory for each block.
    assert target.shared_memory_per_block_bytes == target.shared_memory_per_sm_bytes - 1024
    assert name.removesuffix("g")[:4] in target.device_name.lower().replace(" ", "")


def test_every_description_is_a_target():
    files = resources.files("jaxserve.targets").joinpath("cards").iterdir()
    assert sorted(file.name for file in files) == sorted(["peaks.json", *(f"{name}.txtpb" for name in TARGETS)])
    assert set(TARGETS) == set(DATA_SHEETS)


@pytest.mark.parametrize(("name", "arch"), [("a10g", "sm_86"), ("h100", "sm_90a"), ("b200", "sm_100a")])
def test_ptx_arch(name, arch):
    assert get_target(name).ptx_arch == arch


@pytest.mark.parametrize("name", ["h300", "", "H200"])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=f"target='{name}'.*a100, a10g, l4, rtx4090, h100, h200, b200"):
        get_target(name)


@pytest.mark.parametrize("name", TARGETS)
def test_mesh_is_of_such_gpus(name):
    target = get_target(name)
    device = target.mesh().devices.flat[0]
    assert device.platform == "gpu"
    assert device.compute_capability == ".".join(map(str, target.compute_capability))
    assert device.core_count == target.num_sms


def test_mesh_shapes():
    target = get_target("h200")
    assert dict(target.mesh(16).shape) == {"tensor": 16}
    assert dict(target.mesh(8, axis_names=("data", "tensor"), shape=(2, 4)).shape) == {"data": 2, "tensor": 4}
    assert dict(target.mesh(4, axis_names=("tensor", "data")).shape) == {"tensor": 4, "data": 1}
    with pytest.raises(ValueError, match=r"shape=\(2, 2\).*num_devices=8"):
        target.mesh(8, axis_names=("data", "tensor"), shape=(2, 2))
    with pytest.raises(ValueError, match=r"shape=\(8,\).*2 sizes"):
        target.mesh(8, axis_names=("data", "tensor"), shape=(8,))
    with pytest.raises(ValueError, match=r"num_devices=12.*multiple of 8"):
        target.mesh(12)


def test_without_the_compiler_the_extra_is_named():
    code = """
import sys; sys.modules["jax_plugins"] = None
from jaxserve.targets import get_target
try: get_target("l4").mesh()
except NotImplementedError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'jaxserve[aot]'" in done.stdout
