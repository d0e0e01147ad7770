"""What the kernels take for granted about the GPU that they run on."""

import jax

PROGRAMS = 132  # one wave of an H100's or H200's multiprocessors


def hopper_or_newer() -> bool:
    """Whether this process's GPUs, if it has any, are of compute capability 9.0 or above: memory and instructions."""
    capability = getattr(jax.local_devices()[0], "compute_capability", None)
    return capability is None or float(capability) >= 9.0
