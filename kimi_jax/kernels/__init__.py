"""GPU kernels (Pallas), each beside the op in `ops` that it stands in for."""
