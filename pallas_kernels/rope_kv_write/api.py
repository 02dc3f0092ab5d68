"""rope_kv_write: what lies between the qkv projection and attention, in one pass over the projection's output."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose_backend
from pallas_kernels.kv_write.checks import check_caches, check_floats, check_scales, check_slots
from pallas_kernels.kv_write.triton import refusal
from pallas_kernels.rope_kv_write import reference, triton

PairLayout = Literal["half", "interleaved"]

_IMPLEMENTATIONS: dict[str, Callable[..., tuple[jax.Array, jax.Array, jax.Array]]] = {
    "reference": reference.rope_kv_write,
    "triton": triton.rope_kv_write,
    "triton_interpret": functools.partial(triton.rope_kv_write, interpret=True),
}


def rope_kv_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    slot_mapping: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    epsilon: float = 1e-6,
    pair_layout: PairLayout = "half",
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    device: jax.Device | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norm queries and keys (if the model does), rotate them, write keys and values into the paged cache.

    RMSNorm over a head (arXiv:1910.07467, as in Qwen3): x / sqrt(mean(x^2) + epsilon) * weight, in float32, rounded to
    qkv's dtype. Rotary embedding (arXiv:2104.09864) of the first R lanes of a head, in float32, rounded again. The
    cache write is that of `kv_write`, quantised where the cache is.

    Args:
        qkv: [T, K, G+2, H], for each KV head its G query heads, its key and its value; float32, bfloat16 or float16.
        cos, sin: float32 [T, R/2], of each row's angles. R <= H; lanes from R on are not rotated.
        k_cache, v_cache, slot_mapping, k_scale, v_scale, backend, device: as for `kv_write`.
        q_norm, k_norm: [H] weights of the head norms, float32, bfloat16 or float16; both or neither.
        epsilon: of the head norms.
        pair_layout: which lanes turn together: "half" is (i, i + R/2) (Llama, Qwen), "interleaved" (2i, 2i + 1) (GLM).

    Returns:
        (q, k_cache, v_cache): q [T, K, G, H] in qkv's dtype, normed and rotated; caches as `kv_write` returns them, in
        place where they are donated.

    Raises:
        ValueError: shapes or dtypes disagree, pair_layout or the backend is unknown.
        NotImplementedError: the named backend cannot run on the device, or cannot address a cache of this size.
    """
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(f"qkv {qkv.shape}: must be [T, K, G+2, H] with G at least 1")
    check_floats(qkv=qkv, q_norm=q_norm, k_norm=k_norm)
    num_tokens, num_kv_heads, num_rows, head_dim = qkv.shape
    if cos.ndim != 2 or cos.shape[0] != num_tokens or not 1 <= cos.shape[1] <= head_dim // 2:
        raise ValueError(f"cos {cos.shape}: must be [{num_tokens}, R/2] with R/2 from 1 to {head_dim // 2}")
    if sin.shape != cos.shape or cos.dtype != jnp.float32 or sin.dtype != jnp.float32:
        raise ValueError(f"cos {cos.dtype} and sin {sin.shape} {sin.dtype}: must both be {cos.shape} float32")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: both or neither must be None")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (head_dim,):
            raise ValueError(f"{name} {weight.shape}: must be [{head_dim}]")
    if pair_layout not in ("half", "interleaved"):
        raise ValueError(f"pair_layout={pair_layout!r}: allowed are 'half' and 'interleaved'")
    check_caches(k_cache, v_cache, num_kv_heads, head_dim)
    check_slots(slot_mapping, num_tokens, k_cache)
    check_scales(k_cache, k_scale, v_scale)
    refusals = {"triton": lambda: refusal(k_cache)}
    run = choose_backend("rope_kv_write", backend, _IMPLEMENTATIONS, device=device, refusals=refusals)
    qkv, cos, sin, k_cache, v_cache, slot_mapping, norms, scales = jax.tree.map(
        jnp.asarray, (qkv, cos, sin, k_cache, v_cache, slot_mapping, (q_norm, k_norm), (k_scale, v_scale))
    )
    if not qkv.size:
        return jnp.zeros((num_tokens, num_kv_heads, num_rows - 2, head_dim), qkv.dtype), k_cache, v_cache
    options: dict[str, Any] = dict(q_norm=norms[0], k_norm=norms[1], k_scale=scales[0], v_scale=scales[1])
    return run(
        qkv, cos, sin, k_cache, v_cache, slot_mapping, epsilon=epsilon, pair_layout=pair_layout, **options
    )
