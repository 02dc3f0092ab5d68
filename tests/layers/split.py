"""Run as a program on 8 simulated devices: quantised layers and decoders over ranks; exits non-zero where they differ
from one device (int4), or from numpy's emulation of what each rank does (fp8)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import QuantizationConfig
from jaxserve.layers.fp8 import Fp8Linear
from jaxserve.layers.int4 import Int4Linear
from jaxserve.models.forward import forward
from jaxserve.models.params import flatten, model_from_params
from jaxserve.runner.sharding import TENSOR, param_sharding
from tests.layers.quantized import CONFIGS, fp8_dense, fp8_product, int4_dense, model_config, random_model

NUM_IN = 512
COLUMN: dict[str, Any] = dict(in_shape=(NUM_IN,), out_shape=(2, 48), axes=(None, "mlp", "embed"))
ROW: dict[str, Any] = dict(in_shape=(4, NUM_IN // 4), out_shape=(40,), axes=("embed", "kv_heads", "head"))
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)
EXCHANGE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
INT4 = [CONFIGS["int4"], QuantizationConfig(group_size=None), QuantizationConfig()]


def on_mesh(function: Callable[..., Any], model: Any, mesh: Mesh, *args: np.ndarray) -> tuple[Any, Counter[str]]:
    """function(model, *args) with the parameters split over the mesh, its results whole; and what devices exchange."""
    params = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, nnx.Param))
    structure = jax.tree.structure(model)  # of the arrays in them
    whole = NamedSharding(mesh, PartitionSpec())

    def place(param: Any) -> Any:
        value = param.get_value()
        return jax.device_put(value, param_sharding(mesh, value.shape, param.get_metadata("axes")))

    leaves = [place(param) for param in params]

    def run(leaves: Any, *args: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(jax.tree.unflatten(structure, leaves), *args)

    jitted: Any = jax.jit(run, out_shardings=whole)
    inputs = [jax.device_put(arg, whole) for arg in args]
    program = jitted.lower(leaves, *inputs).compile()
    return jax.tree.map(np.asarray, program(leaves, *inputs)), Counter(EXCHANGE.findall(program.as_text()))


def make_layers(shapes: dict[str, Any]) -> list[Any]:
    """One of 8 bits and several of 4, with biases, all random."""
    rng = np.random.default_rng(0)
    options: dict[str, Any] = dict(**shapes, use_bias=True, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    layers: list[Any] = [Fp8Linear(**options), *(Int4Linear(**options, quantization=kind) for kind in INT4)]
    for layer in layers:
        layer.bias.set_value(jnp.asarray(rng.standard_normal(shapes["out_shape"]), jnp.float32))
        scales = layer.scales.get_value()
        layer.scales.set_value(scales * rng.uniform(0.5, 2, scales.shape).astype(np.float32))
        if getattr(layer, "zeros", None) is not None:
            layer.zeros.set_value(jnp.asarray(rng.integers(0, 17, scales.shape), jnp.int8))
    return layers


def expected_of(layer: Any, x: np.ndarray, num_ranks: int) -> np.ndarray:
    """[T, N] float64; `num_ranks`: over which the input features are split."""
    if isinstance(layer, Fp8Linear):
        y = fp8_product(x, fp8_dense(layer, NUM_IN), num_ranks)
    else:
        y = x @ int4_dense(layer, NUM_IN)
    return y + np.asarray(layer.bias.get_value(), np.float64).reshape(-1)


def check_layers(num_ranks: int, mesh: Mesh) -> None:
    for shapes in (COLUMN, ROW):
        layers = nnx.List(make_layers(shapes))
        for num_rows in (1, 6):
            x = np.random.default_rng(1).standard_normal((num_rows, *shapes["in_shape"])).astype(np.float32)
            ys, exchanged = on_mesh(lambda layers, x: [layer(x) for layer in layers], layers, mesh, x)
            for y, layer in zip(ys, layers, strict=True):
                expected = expected_of(layer, x.reshape(num_rows, -1), num_ranks if shapes is ROW else 1)
                np.testing.assert_allclose(y, expected.reshape(y.shape), rtol=1e-5, atol=1e-5)
            # The sum over ranks; else only what this check itself wants whole. XLA may put several into one.
            assert exchanged.keys() == {"all-reduce" if shapes is ROW else "all-gather"}, exchanged
            assert exchanged.total() <= len(layers)


def check_int4_decoder(num_ranks: int, mesh: Mesh) -> None:
    model = random_model(model_config(CONFIGS["int4"]), tensor_parallel_size=num_ranks)
    logits, _ = on_mesh(forward, model, mesh, TOKENS)
    error = distance(logits, jax.jit(forward)(model, TOKENS))
    print(f"int4, {num_ranks} ranks: {error:.1e} off one device")
    assert error < 1e-5


def check_fp8_decoder(num_ranks: int, mesh: Mesh) -> None:
    """Activations of a rank have scales of their own, so roundings are others; but by no means worse ones."""
    config = model_config(CONFIGS["fp8"])
    model = random_model(config, tensor_parallel_size=num_ranks)
    params = flatten(model)
    dense = {path: values for path, values in params.items() if not path.endswith("scales")}
    for path in params.keys() - dense.keys():
        weight, scales = dense[path.replace("scales", "weight")], params[path]
        scales = scales.reshape(*scales.shape, *(1,) * (weight.ndim - scales.ndim))
        dense[path.replace("scales", "weight")] = weight.astype(jnp.float32) * scales
    exact = jax.jit(forward)(model_from_params(replace(config, quantization=None), dense), TOKENS)
    logits, _ = on_mesh(forward, model, mesh, TOKENS)
    one_device, several = distance(jax.jit(forward)(model, TOKENS), exact), distance(logits, exact)
    print(f"fp8: {one_device:.4f} off exact activations on one device, {several:.4f} on {num_ranks} ranks")
    assert 0.001 < several < 1.2 * one_device < 0.2


def distance(x: Any, y: Any) -> float:
    """Root mean square of the difference, relative to that of y."""
    return float(np.linalg.norm(np.asarray(x) - np.asarray(y)) / np.linalg.norm(np.asarray(y)))


def main() -> None:
    for num_ranks in (2, 4):
        mesh = Mesh(np.asarray(jax.devices()[:num_ranks]), (TENSOR,))
        check_layers(num_ranks, mesh)
        check_int4_decoder(num_ranks, mesh)
        check_fp8_decoder(num_ranks, mesh)


if __name__ == "__main__":
    main()
