"""Building blocks of the decoder (flax.nnx); each Param declares shape, dtype and logical axes where it is made."""
