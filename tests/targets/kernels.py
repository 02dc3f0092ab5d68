"""Small Pallas kernels to compile."""

import os
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as plt


def double(x, *, num_warps=4):
    """One block. With one warp a large tile does not fit into registers."""
    def kernel(x_ref, out_ref):
        tile = x_ref[...]
        out_ref[...] = tile / jnp.sum(tile) * 2  # the sum keeps all of the tile alive

    params = plt.CompilerParams(num_warps=num_warps)
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double",
                          compiler_params=params)(x)


double_in_one_warp = partial(double, num_warps=1)


def matmul(a, b):
    """One block, which holds both operands in shared memory."""
    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = plt.dot(a_ref[...], b_ref[...])

    out_shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32)
    params = plt.CompilerParams(num_warps=8, num_stages=1)
    return pl.pallas_call(kernel, out_shape=out_shape, name="matmul", compiler_params=params)(a, b)


def mosaic_double(x):
    """Through Mosaic GPU: x comes into shared memory and leaves from there."""
    def mosaic_kernel(x_ref, out_ref, buffer, barrier):
        plgpu.copy_gmem_to_smem(x_ref, buffer, barrier)
        plgpu.barrier_wait(barrier)
        buffer[...] = buffer[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, out_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(mosaic_kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
                        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()])(x)


def abort(x):
    """As the compiler does where LLVM cannot express a kernel."""
    os._exit(3)
    return x
