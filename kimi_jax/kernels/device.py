"""What the kernels take for granted about the GPU that they run on."""

import jax

PROGRAMS = 132  # one wave of an H100's or H200's multiprocessors


def hopper_or_newer() -> bool:
    """Whether this process's GPUs, if it has any, are of compute capability 9.0 or above: memory and instructions."""
    capability = getattr(jax.local_devices()[0], "compute_capability", None)
    return capability is None or float(capability) >= 9.0


def hopper_for_mosaic() -> bool:
    """Whether this process's devices are Hopper GPUs (a lowering knows "cuda" only) and this JAX can compile for them
    what `kernels` writes in Pallas's Mosaic GPU form.

    For MLA: JAX 0.10 cannot transpose what is swizzled, and 0.12 stores whole cache lines only, so not 48 heads'
    statistics; `mla_decode_warps` knows in which order 0.11 keeps an array's registers. KDA's step has run on a GPU
    with 0.11 alone.
    """
    hopper = getattr(jax.local_devices()[0], "compute_capability", None) == "9.0"
    return hopper and jax.__version_info__[:2] == (0, 11)
