"""The decoder's building blocks as flax.nnx modules; shapes, dtypes and logical axes are declared where a Param is made."""
