"""Block sizes as data: one JSON file an operation, keyed by device and shape."""

from pallas_kernels.tuning.table import look_up

__all__ = ["look_up"]
