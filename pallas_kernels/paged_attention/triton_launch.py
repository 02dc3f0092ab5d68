"""What the Triton attention kernels share outside: what they can serve, tuned sizes, the launch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.dispatch import Target
from pallas_kernels.tuning import look_up


def refusal(q: jax.Array, k_cache: jax.Array) -> str | None:
    """Why these kernels cannot be compiled for this call; None if they can."""
    if product_dtype(q, k_cache).itemsize > 2:
        return f"q {q.dtype} and k_cache {k_cache.dtype}: products are made in bfloat16 or float16"
    # Pallas computes offsets in 32 bits up to 2^32 bytes, and Triton takes them as signed.
    if k_cache.dtype.itemsize == 1 and 2**31 < math.prod(k_cache.shape) <= 2**32:
        return f"k_cache {k_cache.shape} {k_cache.dtype}: offsets of one-byte elements wrap from 2^31 to 2^32"
    return None


def product_dtype(q: Any, k_cache: Any) -> jnp.dtype:
    """In what queries and keys are multiplied: the cache's dtype, or the query's if the cache is quantised."""
    return jnp.dtype(q.dtype if k_cache.dtype.itemsize == 1 else k_cache.dtype)


def has_native_fp8(target: Target) -> bool:
    """Whether there is an instruction that converts float8_e4m3fn."""
    return target.capability is None or target.capability >= (8, 9)


def tuned(kernel: str, target: Target, q: jax.Array, k_cache: jax.Array) -> dict[str, int]:
    """The kernel's sizes from pallas_kernels/tuning/paged_attention.json."""
    capability = target.capability and float("{}.{}".format(*target.capability))
    group_heads, head_dim = q.shape[2:]
    facts = dict(group_heads=group_heads, head_dim=head_dim, cache=k_cache.dtype.name)
    return look_up("paged_attention", kernel, capability=capability, **facts)


def call(
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: tuple[Any, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> list[jax.Array]:
    """Runs kernel(*refs of inputs, *refs of outputs); inputs may be nested, as the kernel's arguments then are."""
    whole = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=jax.tree.map(lambda _: whole, inputs),
        out_specs=[whole] * len(outputs),
        out_shape=list(outputs),
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )
    return list(run(*inputs))
