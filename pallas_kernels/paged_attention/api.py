"""Paged attention: one query token a sequence (decode), or a mix of decodes and prompt chunks (ragged).

The cache is that of PagedAttention (Kwon et al. 2023, arXiv:2309.06180): B blocks of P token slots, a table of block
ids for each sequence. Token number t of a sequence lies in block block_tables[s, t // P], slot t % P.

Common to both functions:
- Scores, softmax and sums are float32 whatever the input dtype; the output has q's dtype.
- score = scale * q.k; with soft_cap c (Gemma 2) it becomes c * tanh(score / c), before the mask.
- With window w the query at position p sees keys p-w+1 .. p; without, 0 .. p.
- Slots past a sequence's context and blocks that no table names are never part of a result, whatever they hold (NaN
  too). Table entries past the context must still be valid block ids (0 will do).
- scale, window and soft_cap are Python values: each combination is its own program.
- A quantised cache, int8 or float8_e4m3fn (arXiv:2209.05433), holds x / scale. Scales are float32 [K], one for each
  head, or [B, K], one for each block and head. float8 may go without, which means 1.

Backends: "reference" (jax.numpy, any platform), "triton" (NVIDIA GPUs from 8.0 on, products in bfloat16 or float16),
"mosaic" (9.0 only; see mosaic_tiles.refusal for what it leaves to Triton) and
"triton_interpret" (the same kernels in Pallas' interpreter, any platform and dtype, slow; for tests).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Refusal, Target, choose_backend, target_of
from pallas_kernels.kv_write.checks import QUANTISED, check_caches, check_floats, check_scales
from pallas_kernels.paged_attention import reference, triton, triton_ragged
from pallas_kernels.paged_attention.quantization import dequantize
from pallas_kernels.paged_attention.triton_launch import refusal as triton_refusal
from pallas_kernels.paged_attention.triton_tiles import Cache

QUERY_TILE = reference.QUERY_TILE
"""Rows of one sequence that a ragged tile covers at most. The host cuts prompt chunks into tiles of this size."""


def paged_attention_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    device: jax.Device | None = None,
) -> jax.Array:
    """Attention of one query token a sequence, the last of its context.

    Args:
        q: [S, K, G, H] float32, bfloat16 or float16, G query heads for each KV head.
        k_cache, v_cache: [B, P, K, H], one layer's caches: float32, bfloat16, float16, float8_e4m3fn or int8; they
            hold the query token's own key and value already.
        block_tables: [S, M] int32 block ids.
        context_lens: [S] int32 tokens, this step's included, at most M * P; 0 marks a padding row.
        scale: factor on q.k, usually H ** -0.5.
        window: sliding window in tokens (>= 1), or None.
        soft_cap: cap on scores (> 0), or None.
        k_scale, v_scale: float32 [K] or [B, K], or None: of a quantised cache.
        backend: a name, or None for the device's best.
        device: what the program is compiled for (a topology's device too); None is JAX's default device.

    Returns:
        [S, K, G, H] in q's dtype; rows with context 0 are 0.

    Raises:
        ValueError: shapes or dtypes disagree, window or soft_cap is out of range, or the backend is unknown.
        NotImplementedError: the named backend cannot run on the device, or not with these shapes and dtypes.
    """
    _check_cache(q, k_cache, v_cache, k_scale, v_scale)
    _check_options(window, soft_cap)
    num_seqs = q.shape[0]
    _check_tables(block_tables, num_seqs, context_lens=context_lens)
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    backends, refusals = _backends(reference.decode, triton.decode, _mosaic_decode, device, q, cache)
    decode = choose_backend("paged_attention_decode", backend, backends, device=device, refusals=refusals)
    arrays = jax.tree.map(jnp.asarray, (q, cache, block_tables, context_lens))
    if _nothing_to_see(*arrays[:3]):
        return jnp.zeros(q.shape, q.dtype)
    return decode(*arrays, scale=scale, window=window, soft_cap=soft_cap)


def paged_attention_ragged(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    num_decodes: jax.Array,
    tile_seq: jax.Array,
    tile_row: jax.Array,
    num_tiles: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    backend: str | None = None,
    device: jax.Device | None = None,
) -> jax.Array:
    """Causal attention of a mixed step: sequences with one token each first, then chunks of prompts.

    Rows 0 .. num_decodes-1 are decodes: row i is the only token of sequence i. A sequence s from num_decodes on owns
    rows query_starts[s] .. +query_lens[s]-1; its last row sits at position context_lens[s]-1. Rows of sequences lie
    without gaps; those of no sequence come after them. The host cuts the rows of chunks (not the decodes') into tiles:
    tile i covers the rows of sequence tile_seq[i] from row tile_row[i] on, at most QUERY_TILE of them, and never past
    the sequence's last row.

    Args:
        q: [T, K, G, H] float32, bfloat16 or float16.
        k_cache, v_cache: [B, P, K, H], one layer's caches, as for paged_attention_decode; they hold this step's keys
            and values already.
        block_tables: [S, M] int32 block ids.
        context_lens: [S] int32 tokens, this step's included; 0 marks an unused sequence row.
        query_starts, query_lens: [S] int32 rows.
        num_decodes: [] int32, at most min(S, T).
        tile_seq, tile_row: [Q] int32; only the first num_tiles are read.
        num_tiles: [] int32, at most Q.
        scale, window, soft_cap, k_scale, v_scale, backend, device: as for paged_attention_decode.

    Returns:
        [T, K, G, H] in q's dtype; rows of no sequence are 0.

    Raises:
        ValueError: shapes or dtypes disagree, window or soft_cap is out of range, or the backend is unknown.
        NotImplementedError: the named backend cannot run on the device, or not with these shapes and dtypes.
    """
    _check_cache(q, k_cache, v_cache, k_scale, v_scale)
    _check_options(window, soft_cap)
    _check_tables(
        block_tables, block_tables.shape[0], context_lens=context_lens, query_starts=query_starts, query_lens=query_lens
    )
    _check_int32((), num_decodes=num_decodes, num_tiles=num_tiles)
    _check_int32(tile_seq.shape[:1], tile_seq=tile_seq, tile_row=tile_row)
    cache = Cache(k_cache, v_cache, k_scale, v_scale)
    backends, refusals = _backends(reference.ragged, triton_ragged.ragged, _mosaic_ragged, device, q, cache)
    ragged = choose_backend("paged_attention_ragged", backend, backends, device=device, refusals=refusals)
    if not tile_seq.shape[0]:  # loops over tiles must have one that they could read
        tile_seq = tile_row = jnp.zeros(1, jnp.int32)
    rows = (context_lens, query_starts, query_lens, num_decodes)
    tiles = (tile_seq, tile_row, num_tiles)
    arrays = jax.tree.map(jnp.asarray, (q, cache, block_tables, *rows, *tiles))
    if _nothing_to_see(*arrays[:3]):
        return jnp.zeros(q.shape, q.dtype)
    return ragged(*arrays, scale=scale, window=window, soft_cap=soft_cap)


def _nothing_to_see(q: jax.Array, cache: Cache, block_tables: jax.Array) -> bool:
    """No query, or no sequence that could have a token: what comes out is empty or 0."""
    return not (q.size and cache.k.size and block_tables.size)


_Function = Callable[..., jax.Array]
_Mosaic = tuple[_Function, Callable[..., str | None]]


# JAX takes a fifth of a second to import Mosaic: it waits for a device that can run it.
def _mosaic_decode() -> _Mosaic:
    from pallas_kernels.paged_attention import mosaic_decode

    return mosaic_decode.decode, mosaic_decode.refusal


def _mosaic_ragged() -> _Mosaic:
    from pallas_kernels.paged_attention import mosaic_ragged

    return mosaic_ragged.ragged, mosaic_ragged.refusal


def _backends(
    on_dense: _Function,
    on_triton: _Function,
    on_mosaic: Callable[[], _Mosaic],
    device: jax.Device | None,
    q: jax.Array,
    cache: Cache,
) -> tuple[dict[str, _Function], dict[str, Refusal]]:
    """Backend name -> function(q, cache, *arrays, **options), and backend name -> why it cannot serve this call."""

    def reference(q: jax.Array, cache: Cache, *arrays: jax.Array, **options: Any) -> jax.Array:
        k_cache, v_cache = cache.k, cache.v
        if k_cache.dtype in QUANTISED:
            k_cache, v_cache = dequantize(k_cache, cache.k_scale), dequantize(v_cache, cache.v_scale)
        return on_dense(q, k_cache, v_cache, *arrays, **options)

    target = target_of(device)
    functions: dict[str, _Function] = {
        "reference": reference,
        "triton": partial(on_triton, target=target),
        "mosaic": lambda *arrays, **options: on_mosaic()[0](*arrays, target=target, **options),
        "triton_interpret": partial(on_triton, target=Target("interpreter"), interpret=True),
    }
    refusals: dict[str, Refusal] = {
        "triton": lambda: triton_refusal(q, cache.k),
        "mosaic": lambda: on_mosaic()[1](target, q, cache.k),
    }
    return functions, refusals


def _check_cache(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, k_scale: jax.Array | None, v_scale: jax.Array | None
) -> None:
    if q.ndim != 4:
        raise ValueError(f"q {q.shape}: must be [rows, K, G, H]")
    check_floats(q=q)
    check_caches(k_cache, v_cache, q.shape[1], q.shape[3])
    check_scales(k_cache, k_scale, v_scale)


def _check_options(window: int | None, soft_cap: float | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1 token, or None")
    if soft_cap is not None and not soft_cap > 0:  # NaN too
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None")


def _check_tables(block_tables: jax.Array, num_seqs: int, **per_seq: jax.Array) -> None:
    if block_tables.ndim != 2 or block_tables.shape[0] != num_seqs or block_tables.dtype != jnp.int32:
        raise ValueError(f"block_tables {block_tables.shape} {block_tables.dtype}: must be [{num_seqs}, M] int32")
    _check_int32((num_seqs,), **per_seq)


def _check_int32(shape: tuple[int, ...], **arrays: jax.Array) -> None:
    for name, array in arrays.items():
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} {array.shape} {array.dtype}: must be {list(shape)} int32")
