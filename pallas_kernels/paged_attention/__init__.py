"""Attention over keys and values that lie in the blocks of a paged cache."""

from pallas_kernels.paged_attention.api import QUERY_TILE, paged_attention_decode, paged_attention_ragged

__all__ = ["QUERY_TILE", "paged_attention_decode", "paged_attention_ragged"]
