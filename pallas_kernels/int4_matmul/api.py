"""int4_matmul: activations of 16 or 32 bits times weights of 4 (W4A16).

Backends: "reference" (jax.numpy, any platform), "triton" (NVIDIA GPUs from 8.0 on) and "triton_interpret" (the same
kernel in Pallas' interpreter, any platform, slow; for tests).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend, target_of
from pallas_kernels.int4_matmul import layout, reference, triton
from pallas_kernels.int4_matmul.layout import BLOCK, Int4Weight

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def int4_matmul(
    x: jax.Array,
    weight: Int4Weight,
    bias: jax.Array | None = None,
    *,
    backend: str | None = None,
    device: jax.Device | None = None,
) -> jax.Array:
    """x times dequantised weights: out[t, n] = sum over k of x[t, k] * (q[k, n] - zero[k, n]) * scale[k, n] + bias[n].

    Weights as GPTQ (Frantar et al. 2023, arXiv:2210.17323) and AWQ (Lin et al. 2024, arXiv:2306.00978) make them: 4
    bits, one scale and zero-point for each output and group of 32, 64, 128 or all input features. They are read packed;
    sums are float32. layout.py defines the packed layout and how it is sharded, repack.py makes it from checkpoints.

    Args:
        x: [T, K] float32, bfloat16 or float16. For a weight whose features were reordered (act-order), x must be too:
            see repack.Repacked.
        weight: packed [ceil(K / 128), N, 16] int32 and its scales and zero-points.
        bias: [N] float32, bfloat16 or float16, or None.
        backend: a name, or None for the device's best.
        device: what the program is compiled for (a topology's device too); None is JAX's default device.

    Returns:
        [T, N] in x's dtype.

    Raises:
        ValueError: shapes or dtypes disagree, or the backend is unknown.
        NotImplementedError: the named backend cannot run on the device.
    """
    if x.ndim != 2 or x.dtype not in _DTYPES:
        raise ValueError(f"x {x.shape} {x.dtype}: must be [T, K] float32, bfloat16 or float16")
    layout.check(weight)
    num_blocks, num_outputs, _ = weight.packed.shape
    if -(-x.shape[1] // BLOCK) != num_blocks:
        raise ValueError(
            f"x {x.shape}: K must be {max((num_blocks - 1) * BLOCK + 1, 0)} to {num_blocks * BLOCK}, by packed "
            f"{weight.packed.shape} (one shard's, where input features are sharded)"
        )
    if bias is not None and (bias.shape != (num_outputs,) or bias.dtype not in _DTYPES):
        raise ValueError(
            f"bias {bias.shape} {bias.dtype}: must be [{num_outputs}] float32, bfloat16 or float16, or None"
        )
    on_target = partial(triton.int4_matmul, target=target_of(device))
    implementations: dict[str, Callable[..., jax.Array]] = {
        "reference": reference.int4_matmul,
        "triton": on_target,
        "triton_interpret": partial(on_target, interpret=True),
    }
    matmul = choose_backend("int4_matmul", backend, implementations, device=device)
    x, weight, bias = jax.tree.map(jnp.asarray, (x, weight, bias))
    if not x.size or not num_outputs:  # sums of nothing
        sums = jnp.zeros((x.shape[0], num_outputs), x.dtype)
        return sums if bias is None else sums + bias.astype(x.dtype)
    return matmul(x, weight, bias)
