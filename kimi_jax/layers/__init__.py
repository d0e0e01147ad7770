"""The decoder's parts as flax.nnx modules: parameters with logical axis names, and calls into `ops`."""
