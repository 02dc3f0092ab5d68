"""Grouped-query attention: projections here; what lies between them is the batch's business, which knows where keys and
values live."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.config import ModelConfig, kv_groups
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.quantized import make_linear
from pallas_kernels.rope_kv_write import split_and_rotate

Cache = jax.Array | None


@partial(jax.tree_util.register_dataclass, data_fields=("cos", "sin", "q_norm", "k_norm"), meta_fields=("epsilon",))
@dataclass(frozen=True)
class HeadTransform:
    """What happens to queries and keys before they meet: norm, then rotation.

    Attributes:
      cos, sin: float32 [T, R/2], of each row's angles.
      q_norm, k_norm: [H] weights of an RMSNorm over the head, or None.
      epsilon: of the norms.
    """

    cos: jax.Array
    sin: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    epsilon: float = 1e-6


class AttentionBatch(Protocol):
    """What a step's rows are and where their keys and values live. Must be a registered pytree: layers are traced once
    and called with it."""

    def attend(self, qkv: jax.Array, heads: HeadTransform, k_cache: Cache, v_cache: Cache, *, scale: float,
               window: int | None) -> tuple[jax.Array, Cache, Cache]:
        """Transforms queries and keys, stores keys and values, then lets every query see what it may.

        Args:
          qkv: [T, K, G+2, H], for each KV head its G query heads, its key and its value.
          k_cache, v_cache: this layer's arrays, in the batch's own layout.
          scale: factor on the scores.
          window: a query sees itself and window - 1 tokens before it; None for all.

        Returns:
          [T, K, G, H] and the caches with k and v in them.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBatch:
    """Causal attention inside equal runs of rows, without a cache; differentiable, for training and for checks.

    Attributes:
      positions: [T] int32, each row's place in its sequence; a row sees rows of its run at its own or lower positions.
      segment_ids: [T] int32 or None; rows of a run see only their own segment (packed sequences).
      num_runs: T = num_runs * rows per run.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    num_runs: int = field(default=1, metadata={"static": True})

    def attend(self, qkv: jax.Array, heads: HeadTransform, k_cache: Cache, v_cache: Cache, *, scale: float,
               window: int | None) -> tuple[jax.Array, Cache, Cache]:
        """See `AttentionBatch.attend`; the caches are passed through."""
        q, k, v = split_and_rotate(qkv, heads.cos, heads.sin, q_norm=heads.q_norm, k_norm=heads.k_norm,
                                   epsilon=heads.epsilon)

        def runs(x: jax.Array) -> jax.Array:
            return x.reshape(self.num_runs, -1, *x.shape[1:])

        scores = jnp.einsum("btkgh,bskh->bkgts", runs(q), runs(k), preferred_element_type=jnp.float32) * scale
        visible = self._visible(window)[:, None, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", weights, runs(v))
        return out.reshape(q.shape), k_cache, v_cache

    def _visible(self, window: int | None) -> jax.Array:
        """[runs, rows, rows] bool: may the query (axis 1) see the key (axis 2)?"""
        positions = self.positions.reshape(self.num_runs, -1)
        distance = positions[:, :, None] - positions[:, None, :]
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        if self.segment_ids is not None:
            segments = self.segment_ids.reshape(self.num_runs, -1)
            visible &= segments[:, :, None] == segments[:, None, :]
        return visible


class Attention(nnx.Module):
    """One layer's attention.

    The weight of `qkv` is [K, G+2, H, D]: per KV head its G query heads, its key and its value, so that sharding K
    keeps together what is used together.
    """

    def __init__(self, config: ModelConfig, *, tensor_parallel_size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        num_kv, group = kv_groups(config, tensor_parallel_size)
        width, hidden = config.head_dim, config.hidden_size
        self.scale = width**-0.5
        linear = partial(make_linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.qkv = linear((hidden,), (num_kv, group + 2, width), axes=("kv_heads", None, "head", "embed"),
                          use_bias=config.attention_bias)
        self.out = linear((num_kv, group, width), (hidden,), axes=("embed", "kv_heads", None, "head"),
                          use_bias=config.attention_out_bias)
        self.q_norm, self.k_norm = (
            RMSNorm(width, epsilon=config.rms_norm_eps, axis="head", dtype=dtype) if config.qk_norm else None
            for _ in range(2))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array, k_cache: Cache, v_cache: Cache,
                 batch: AttentionBatch, *, window: int | None) -> tuple[jax.Array, Cache, Cache]:
        """[T, D] and the layer's caches -> the same, advanced."""
        heads = HeadTransform(cos, sin)
        if self.q_norm is not None and self.k_norm is not None:
            heads = HeadTransform(cos, sin, self.q_norm.weight.get_value(), self.k_norm.weight.get_value(),
                                  self.q_norm.epsilon)
        out, k_cache, v_cache = batch.attend(self.qkv(x), heads, k_cache, v_cache, scale=self.scale, window=window)
        return self.out(out), k_cache, v_cache
