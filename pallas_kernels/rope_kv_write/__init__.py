"""From the qkv projection to attention: head norms, rotary embedding and the cache write in one pass."""

from pallas_kernels.rope_kv_write.api import rope_kv_write
from pallas_kernels.rope_kv_write.reference import rms_norm, rotate, split_and_rotate

__all__ = ["rms_norm", "rope_kv_write", "rotate", "split_and_rotate"]
