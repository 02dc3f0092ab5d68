"""The decoder that all supported families share; what differs between them is in `ModelConfig`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidInputError
from jaxserve.layers.attention import Attention, AttentionBatch, Cache
from jaxserve.layers.embedding import Embedding
from jaxserve.layers.linear import Linear, project
from jaxserve.layers.mlp import MLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.quantized import check_quantization
from jaxserve.layers.rope import rope_tables

Caches = tuple[tuple[Cache, Cache], ...]
"""Per layer its key and value cache, or (None, None) for a batch that keeps none."""


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, tensor_parallel_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = partial(RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, axis="embed", dtype=dtype)
        self.input_norm = norm()
        self.attention = Attention(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype, rngs=rngs)
        self.post_attention_norm = norm()
        self.mlp = MLP(config.hidden_size, config.intermediate_size, use_bias=config.mlp_bias,
                       tensor_parallel_size=tensor_parallel_size, quantization=config.quantization, dtype=dtype,
                       rngs=rngs)

    def __call__(self, hidden: jax.Array, cos: jax.Array, sin: jax.Array, k_cache: Cache, v_cache: Cache,
                 batch: AttentionBatch, *, window: int | None) -> tuple[jax.Array, Cache, Cache]:
        """[T, D] and the layer's caches -> the same, advanced."""
        with jax.named_scope("attention"):
            attended, k_cache, v_cache = self.attention(self.input_norm(hidden), cos, sin, k_cache, v_cache, batch,
                                                        window=window)
            hidden = hidden + attended
        with jax.named_scope("mlp"):
            hidden = hidden + self.mlp(self.post_attention_norm(hidden))
        return hidden, k_cache, v_cache


@partial(jax.jit, static_argnames="window")
def _apply_layer(layer: DecoderLayer, hidden: jax.Array, cos: jax.Array, sin: jax.Array, k_cache: Cache,
                 v_cache: Cache, batch: AttentionBatch, window: int | None) -> tuple[jax.Array, Cache, Cache]:
    # The layer crosses as a pytree of arrays, so layers that are alike share one trace and one lowered function;
    # XLA inlines the calls. Unrolling them in Python instead makes lowering ten times slower.
    return layer(hidden, cos, sin, k_cache, v_cache, batch, window=window)


class Decoder(nnx.Module):
    """Token ids to logits.

    Args:
      config: the model's shape and options.
      tensor_parallel_size: ranks that the weights will be divided over; decides how KV heads are stored (`kv_groups`).
      dtype: of parameters and activations. Norms, rotations, softmax and logits are float32.
      rngs: random initial weights. Under `nnx.eval_shape` the tree is abstract and costs nothing.

    Raises:
      InvalidInputError: the heads or the MLP cannot be divided over the ranks, or not between the blocks of their
        4-bit weights.
    """

    def __init__(self, config: ModelConfig, *, tensor_parallel_size: int = 1, dtype: jnp.dtype = jnp.float32,
                 rngs: nnx.Rngs):
        if config.intermediate_size % tensor_parallel_size:
            raise InvalidInputError("tensor_parallel_size", tensor_parallel_size,
                                    f"a divisor of the MLP width {config.intermediate_size}")
        check_quantization(config, tensor_parallel_size)
        # A vocabulary that the ranks do not divide is replicated rather than padded.
        vocab_axis = None if config.vocab_size % tensor_parallel_size else "vocab"
        self.config = config
        # A table that is also the output head is split like one; else so that looking up needs no all-reduce.
        table_axes = (vocab_axis, "embed") if config.tie_word_embeddings else (None, "table_width")
        self.embed = Embedding(config.vocab_size, config.hidden_size, axes=table_axes, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(DecoderLayer(config, tensor_parallel_size=tensor_parallel_size, dtype=dtype, rngs=rngs)
                               for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, axis="embed", dtype=dtype)
        self.lm_head = None if config.tie_word_embeddings else Linear(
            (config.hidden_size,), (config.vocab_size,), axes=(vocab_axis, "embed"), dtype=dtype, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, caches: Caches,
                 batch: AttentionBatch) -> tuple[jax.Array, Caches]:
        """Runs all layers over one step's tokens.

        Args:
          token_ids, positions: [T] int32.
          caches: one pair per layer.
          batch: how the rows attend; a registered pytree.

        Returns:
          Normalised hidden states [T, D] and the caches after the step.
        """
        config = self.config
        with jax.named_scope("embed"):
            hidden = self.embed(token_ids)
            cos, sin = rope_tables(config.rope, config.head_dim, config.max_position, positions)
        advanced = []
        for layer, (k_cache, v_cache), window in zip(self.layers, caches, config.layer_windows, strict=True):
            hidden, k_cache, v_cache = _apply_layer(layer, hidden, cos, sin, k_cache, v_cache, batch, window)
            advanced.append((k_cache, v_cache))
        return self.norm(hidden), tuple(advanced)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> float32 [R, V]."""
        with jax.named_scope("logits"):
            if self.lm_head is not None:
                return self.lm_head(hidden, out_dtype=jnp.float32)
            return project(hidden, self.embed.weight.get_value(), out_dtype=jnp.float32)
