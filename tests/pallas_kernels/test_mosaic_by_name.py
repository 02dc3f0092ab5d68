"""The Mosaic kernels are reached by name through the api, and refuse what they leave to Triton."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxserve.targets import get_target
from pallas_kernels import paged_attention_decode
from tests.pallas_kernels.compiling import compile_kernel

Shape = jax.ShapeDtypeStruct


def arguments(width, dtype):
    cache = Shape((8, 16, 2, width), dtype)
    return Shape((3, 2, 4, width), dtype), cache, cache, Shape((3, 4), jnp.int32), Shape((3,), jnp.int32)


def decode(target):
    device = get_target(target).mesh().devices.flat[0]
    return partial(paged_attention_decode, scale=0.1, backend="mosaic", device=device)


def test_by_name():
    program = compile_kernel(decode("h200"), *arguments(64, jnp.bfloat16), target_name="h200")
    assert {kernel.kind for kernel in program.pallas_kernels} >= {"mosaic"}


@pytest.mark.parametrize(("target", "width", "dtype", "reason"), [
    ("a100", 64, jnp.bfloat16, r"9\.0"), ("b200", 64, jnp.bfloat16, "9"), ("h200", 80, jnp.bfloat16, "80"),
    ("h200", 64, jnp.float32, "float32"),
])  # fmt: skip
def test_refusals(target, width, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(decode(target), *arguments(width, dtype))
