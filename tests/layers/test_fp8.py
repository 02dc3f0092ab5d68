"""Projections with 8-bit floats against numpy's, which knows the format from its definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers import fp8
from jaxserve.layers.fp8 import Fp8Linear
from jaxserve.targets import get_target
from pallas_kernels.dispatch import compiling_for
from tests.layers.quantized import e4m3, fp8_dense, fp8_product


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def make_layer(rng: np.random.Generator, in_shape: tuple[int, ...] = (3, 64), *, use_bias: bool = False,
               dtype: str = "float32") -> tuple[Fp8Linear, np.ndarray]:
    """A layer of [T, in_shape] -> [T, 2, 24], and its bias as float64 [48]."""
    layer = Fp8Linear(in_shape, (2, 24), axes=(None,) * (2 + len(in_shape)), use_bias=use_bias, dtype=jnp.dtype(dtype),
                      rngs=nnx.Rngs(0))
    layer.scales.set_value(jnp.asarray(rng.uniform(1e-4, 1e-3, (2, 24)), jnp.float32))
    if layer.bias is None:
        return layer, np.zeros(48)
    layer.bias.set_value(jnp.asarray(rng.standard_normal((2, 24)), dtype))
    return layer, np.asarray(layer.bias.get_value(), np.float64).reshape(48)


def make_rows(rng: np.random.Generator, num_rows: int, num_in: int) -> np.ndarray:
    """Rows of very different sizes; the last all zeros if there is more than one."""
    x = rng.standard_normal((num_rows, num_in)) * np.logspace(-6, 4, num_rows)[:, None]
    x[num_rows - 1 :] *= num_rows == 1
    return x.astype(np.float32)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("in_shape", "use_bias"), [((192,), False), ((3, 64), True)])
def test_equals_numpys_emulation(rng: np.random.Generator, num_rows: int, in_shape: tuple[int, ...],
                                 use_bias: bool) -> None:
    layer, bias = make_layer(rng, in_shape, use_bias=use_bias)
    x, weight = make_rows(rng, num_rows, 192), fp8_dense(layer, 192)
    y = np.asarray(layer(jnp.asarray(x.reshape(-1, *in_shape)))).reshape(num_rows, 48)
    allowed = 1e-6 * (np.abs(x).max(axis=1, keepdims=True) * np.abs(weight).sum(axis=0) + np.abs(bias))
    assert (np.abs(y - fp8_product(x, weight) - bias) <= allowed).all()


def test_error_is_what_rounding_of_activations_allows(rng: np.random.Generator) -> None:
    layer, _ = make_layer(rng)
    x, weight = make_rows(rng, 7, 192).astype(np.float64), fp8_dense(layer, 192)
    # Half a unit in the last of 4 bits, or of the smallest step at a scale of largest / 448.
    of_x = np.maximum(np.abs(x) / 16, np.abs(x).max(axis=1, keepdims=True) / 448 * 2.0**-10)
    error = np.abs(np.asarray(layer(jnp.asarray(x, jnp.float32).reshape(-1, 3, 64))).reshape(7, 48) - x @ weight)
    assert (error <= of_x @ np.abs(weight) * (1 + 1e-5)).all()
    assert error.max() > 0.01 * np.abs(x @ weight).max()  # it is 8 bits indeed


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_form_for_gpus_gives_the_same_numbers(rng: np.random.Generator, num_rows: int, dtype: str) -> None:
    """XLA's CPU compiler can run that form too, though slowly. Sums leave it as bfloat16 where activations are."""
    layer, bias = make_layer(rng, use_bias=True, dtype=dtype)
    x = jnp.asarray(np.clip(make_rows(rng, num_rows, 192), -100, 100).reshape(-1, 3, 64), dtype)
    card = get_target("h200").mesh().devices.flat[0]

    def for_card(x: jax.Array) -> jax.Array:
        with compiling_for(card):
            return layer(x)

    y = jax.jit(for_card)(x)
    assert y.dtype == x.dtype
    exact = fp8_product(np.asarray(x, np.float32).reshape(num_rows, 192), fp8_dense(layer, 192))
    tolerance = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]  # of the sum, then of the result
    got, expected = np.asarray(y, np.float64).reshape(num_rows, 48), exact + bias
    scale = np.abs(np.asarray(x, np.float64).reshape(num_rows, -1)).max(axis=1, keepdims=True)
    allowed = tolerance * (np.abs(exact) + np.abs(expected)) + 1e-6 * scale + 1e-6
    assert (np.abs(got - expected) <= allowed).all()


def test_every_number_of_the_format_survives() -> None:
    codes = np.array([code for code in range(256) if code & 127 != 127], np.uint8)
    values = codes.view(fp8.FP8).astype(np.float32)
    np.testing.assert_array_equal(e4m3(values), values)  # the emulation itself
    quantized, scales = fp8.quantize_rows(jnp.asarray(values)[None])
    np.testing.assert_array_equal(np.asarray(quantized)[0].astype(np.float32), values)
    np.testing.assert_array_equal(scales, [[1]])


def test_new_weights_deviate_as_those_of_linear() -> None:
    layer = Fp8Linear((256,), (64,), axes=("embed", "mlp"), dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    assert np.abs(fp8_dense(layer, 256)).std() == pytest.approx(0.02 * (1 - 2 / np.pi) ** 0.5, rel=0.05)
    assert (np.abs(np.asarray(layer.weight.get_value(), np.float32)).max(axis=1) == 448).all()
