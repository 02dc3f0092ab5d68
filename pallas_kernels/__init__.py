"""Attention, cache and 4-bit kernels behind one typed API each; importable without jaxserve."""

from pallas_kernels.int4_matmul import Int4Weight, int4_matmul
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import QUERY_TILE, paged_attention_decode, paged_attention_ragged
from pallas_kernels.rope_kv_write import rope_kv_write

__all__ = [
    "QUERY_TILE",
    "Int4Weight",
    "int4_matmul",
    "kv_write",
    "paged_attention_decode",
    "paged_attention_ragged",
    "rope_kv_write",
]
