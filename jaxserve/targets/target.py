"""The cards that jaxserve compiles for: facts in XLA's own text format, and meshes of cards that are not there."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from math import prod

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

TARGETS = ("a100", "a10g", "l4", "rtx4090", "h100", "h200", "b200")
"""Names of the cards, by age."""

_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Target:
    """One kind of GPU.

    Attributes:
      name: as in `TARGETS`.
      device_name: NVIDIA's name.
      compute_capability: (major, minor).
      num_sms: streaming multiprocessors.
      shared_memory_per_sm_bytes, shared_memory_per_block_bytes: the latter is the most that a kernel may ask for.
      l2_bytes, memory_bytes: of the whole card.
      bandwidth_bytes_per_s: peak of its memory.
      bf16_flops, fp8_flops: peaks of the tensor cores, dense; None where they lack the type.
      link_bytes_per_s: to the other GPUs of its host, both directions together.
      config_text: all of this, and more, as the GpuTargetConfigProto that XLA reads.
    """

    name: str
    device_name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_bytes_per_s: int
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    config_text: str = field(repr=False)

    @property
    def ptx_arch(self) -> str:
        """As ptxas names it, "sm_90a"; with the instructions that only this generation has, where there are such."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")

    def mesh(self, num_devices: int = 1, *, axis_names: Sequence[str] = ("tensor",),
             shape: Sequence[int] | None = None) -> Mesh:
        """A mesh of such GPUs that are not there: to lower and compile for, not to run on.

        Args:
          num_devices: GPUs; more than 8 sit in hosts of 8.
          axis_names: the mesh's axes.
          shape: their sizes; by default all devices on the first axis.

        Raises:
          ValueError: the numbers do not fit together.
          NotImplementedError: XLA's GPU compiler is not installed, or was hidden from JAX.
        """
        shape = tuple(shape) if shape is not None else (num_devices, *(1,) * (len(axis_names) - 1))
        if len(shape) != len(axis_names) or prod(shape) != num_devices:
            raise ValueError(f"shape={shape}: must have {len(axis_names)} sizes, for {list(axis_names)}, whose product "
                             f"is num_devices={num_devices}")
        if num_devices > _GPUS_PER_HOST and num_devices % _GPUS_PER_HOST:
            raise ValueError(f"num_devices={num_devices}: must be at most 8, or a multiple of 8")
        num_hosts = -(-num_devices // _GPUS_PER_HOST)
        return topologies.make_mesh(_topology(self, f"1x{num_hosts}x{num_devices // num_hosts}"), shape,
                                    tuple(axis_names))


def get_target(name: str) -> Target:
    """The card of that name.

    Raises:
      ValueError: it is none of `TARGETS`.
    """
    if name not in TARGETS:
        raise ValueError(f"target={name!r}: must be one of {', '.join(TARGETS)}")
    return _read(name)


@cache
def _read(name: str) -> Target:
    cards = resources.files("jaxserve.targets").joinpath("cards")
    text = cards.joinpath(f"{name}.txtpb").read_text(encoding="utf-8")
    peaks = json.loads(cards.joinpath("peaks.json").read_text(encoding="utf-8"))[name]
    device = text[: text.index("\n}")]
    major, minor = (int(part) for part in re.findall(r"\b(?:major|minor): (\d+)", device)[:2])

    def number(key: str) -> int:
        match = re.search(rf"\b{key}: (\d+)\b", device)
        assert match, f"{name}.txtpb lacks {key}"
        return int(match[1])

    device_name = re.search(r'\bname: "([^"]+)"', device)
    assert device_name, f"{name}.txtpb lacks name"
    return Target(
        name=name,
        device_name=device_name[1],
        compute_capability=(major, minor),
        num_sms=number("core_count"),
        shared_memory_per_sm_bytes=number("shared_memory_per_core"),
        shared_memory_per_block_bytes=number("shared_memory_per_block_optin"),
        l2_bytes=number("l2_cache_size"),
        memory_bytes=number("device_memory_size"),
        bandwidth_bytes_per_s=number("memory_bandwidth"),
        **peaks,
        config_text=text,
    )


@cache
def _topology(target: Target, topology: str) -> topologies.TopologyDescription:
    try:
        return topologies.get_topology_desc(platform="cuda", topology_name=target.name, topology=topology,
                                            target_config=target.config_text)
    except NotImplementedError as error:
        raise NotImplementedError(_why_no_compiler()) from error


def _why_no_compiler() -> str:
    installed = any(importlib.util.find_spec("jax_plugins") and importlib.util.find_spec(f"jax_plugins.xla_cuda{major}")
                    for major in (12, 13))
    if not installed:
        return "compiling for a GPU needs XLA's GPU compiler: pip install 'jaxserve[aot]'"
    return (f"compiling for a GPU: JAX {jax.__version__} could not start its CUDA plugin. On a machine without a GPU "
            "set JAX_PLATFORMS=cpu in the environment before jax is imported")
