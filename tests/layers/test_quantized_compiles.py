"""Decoders with quantised weights compiled for GPUs: what becomes of projections, weights and exchanges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import ModelConfig, QuantizationConfig
from jaxserve.layers.attention import DenseBatch
from jaxserve.models.params import abstract_model, abstract_params, merge, split
from jaxserve.runner.sharding import param_sharding
from jaxserve.targets import CompiledProgram, compile_for, get_target
from pallas_kernels.dispatch import compiling_for
from tests.layers.quantized import CONFIGS, model_config

SMALL = dict(hidden_size=1024, intermediate_size=2048, num_heads=16, num_kv_heads=4, head_dim=64, vocab_size=128)
LLAMA_70B = dict(hidden_size=8192, intermediate_size=28672, num_layers=4, num_heads=64, num_kv_heads=8, head_dim=128,
                 vocab_size=128256)
NUM_ROWS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchFor(DenseBatch):
    """Layers' traces, which JAX keeps, are then of one card."""

    card: str = field(default="", metadata={"static": True})


def compile_decoder(config: ModelConfig, *, card: str = "h200", num_ranks: int = 1,
                    num_rows: int = NUM_ROWS) -> CompiledProgram:
    """The decoder over runs of 8 rows, or over one row, in bfloat16."""
    target = get_target(card)
    mesh = target.mesh(num_ranks)
    graphdef, _, paths = split(abstract_model(config, tensor_parallel_size=num_ranks, dtype="bfloat16"))
    specs = abstract_params(config, tensor_parallel_size=num_ranks, dtype="bfloat16")
    leaves = [jax.ShapeDtypeStruct(specs[path].shape, specs[path].dtype,
                                   sharding=param_sharding(mesh, specs[path].shape, specs[path].axes))
              for path in paths]

    def run(leaves: Any, tokens: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), compiling_for(mesh.devices.flat[0]):
            model, positions = merge(graphdef, leaves), jnp.arange(num_rows, dtype=jnp.int32) % 8
            batch = BatchFor(positions, num_runs=-(-num_rows // 8), card=card)
            hidden, _ = model(tokens, positions, ((None, None),) * config.num_layers, batch)
            return jax.lax.with_sharding_constraint(model.logits(hidden), PartitionSpec(None, "tensor"))

    return compile_for(run, leaves, jax.ShapeDtypeStruct((num_rows,), jnp.int32), target=target, mesh=mesh)


def weight_bytes(config: ModelConfig, num_ranks: int) -> int:
    """By hand, per rank: embedding, output head and norms in bfloat16, projections in 4 or 8 bits, and scales."""
    width, mlp, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    matrices = [(width, heads + key_value, 1), (heads, width, num_ranks), (width, 2 * mlp, 1), (mlp, width, num_ranks)]
    total = 0
    for num_in, num_out, num_in_parts in matrices:
        out_here = num_out * num_in_parts // num_ranks  # of a row-parallel one each rank has all outputs
        in_here = num_in // num_in_parts
        assert config.quantization
        if config.quantization.kind == "fp8":
            total += in_here * out_here + 4 * out_here
        else:
            assert config.quantization.group_size
            num_scales = in_here * out_here // config.quantization.group_size
            total += in_here * out_here // 2 + num_scales * (2 if config.quantization.symmetric else 3)
    norms = 2 * (2 * config.num_layers + 1) * width
    return config.num_layers * total + norms + 2 * 2 * config.vocab_size * width // num_ranks


def check(program: CompiledProgram, config: ModelConfig, num_ranks: int) -> None:
    """Projections by the library's 8-bit products or our own kernel; no weight is made again; two sums a layer."""
    assert config.quantization
    is_fp8, num_projections = config.quantization.kind == "fp8", 4 * config.num_layers
    assert program.hlo_text.count('custom_call_target="__cublas$lt$matmul$f8"') == is_fp8 * num_projections
    kernels = [kernel.name for kernel in program.pallas_kernels if kernel.name.startswith("int4_matmul")]
    assert len(kernels) == (not is_fp8) * num_projections
    # Whatever else is written is smaller than the smallest weight at 4 bits, so no weight is.
    smallest = config.hidden_size * config.num_heads * config.head_dim // (2 * num_ranks)
    others = [kernel for kernel in program.kernels if kernel.kind not in ("gemm", "pallas")]
    assert max(kernel.output_bytes for kernel in others) < smallest
    assert program.memory.argument_bytes == pytest.approx(weight_bytes(config, num_ranks), rel=0.01)

    exchanged = Counter((kernel.name, "layer" in kernel.op_name) for kernel in program.collectives)
    print(f"{len(program.kernels)} kernels, {exchanged}, {program.memory}")
    sums = exchanged.pop(("kAllReduce", True), 0)
    assert sums == (num_ranks > 1) * 2 * config.num_layers
    assert exchanged == (Counter({("kAllGather", False): 1}) if num_ranks > 1 else Counter())  # of the embeddings
    rows = 2 * NUM_ROWS * config.hidden_size  # and of the gathered ones the part that was there
    assert {kernel.output_bytes for kernel in program.collectives} <= {rows, rows + rows // num_ranks}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_h200(kind: str, num_ranks: int) -> None:
    config = model_config(CONFIGS[kind], **SMALL)
    check(compile_decoder(config, num_ranks=num_ranks), config, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [QuantizationConfig(), QuantizationConfig(kind="fp8")])
def test_llama_70b_on_8_h200s(quantization: QuantizationConfig) -> None:
    config = model_config(quantization, **LLAMA_70B)
    check(compile_decoder(config, num_ranks=8), config, 8)


@pytest.mark.parametrize(("card", "num_rows"), [("l4", 32), ("b200", 32), ("h200", 1)])
def test_fp8_stays_in_8_bits(card: str, num_rows: int) -> None:
    """On other cards; and with one row, which XLA takes for a vector and converts the weight for."""
    config = model_config(CONFIGS["fp8"], num_layers=1, **SMALL)
    program = compile_decoder(config, card=card, num_rows=num_rows)
    assert program.hlo_text.count('custom_call_target="__cublas$lt$matmul$f8"') == 4
    head = 4 * config.hidden_size * config.vocab_size  # XLA may well convert that one
    written = [kernel.output_bytes for kernel in program.kernels if kernel.kind not in ("gemm", "pallas")]
    assert max(size for size in written if size != head) < config.hidden_size * config.num_heads * config.head_dim


@pytest.mark.parametrize("card", ["a100", "a10g"])
def test_fp8_is_refused_by_older_cards(card: str) -> None:
    with pytest.raises(NotImplementedError, match=r"fp8 weights.*8\.9 or newer, not 8\.[06]"):
        compile_decoder(model_config(CONFIGS["fp8"], num_layers=1), card=card)
