"""Products of activations with weights of 4 bits."""

from pallas_kernels.int4_matmul.api import int4_matmul
from pallas_kernels.int4_matmul.layout import Int4Weight
from pallas_kernels.int4_matmul.repack import Repacked, from_awq, from_compressed_tensors, from_gptq, from_nibbles

__all__ = [
    "Int4Weight",
    "Repacked",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "from_nibbles",
    "int4_matmul",
]
