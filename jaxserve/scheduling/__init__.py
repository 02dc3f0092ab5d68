"""Which request computes what in the next step, and in which KV blocks. Plain Python: nothing here imports jax."""
