"""Choosing tokens: `sampler.sample` on the device, `rows` on the host. Importing the package imports no jax."""
