"""Simulated devices: any layout runs on a laptop, in a notebook or under pytest. Must not know: models and layouts."""

from typing import Any

import jax

_COUNT = "jax_num_cpu_devices"


def simulate_devices(n: int) -> None:
    """Let this process see n host devices in place of its own; it keeps those it has if they are n or more.

    n: 1 or more. Call it before anything uses JAX, which counts its devices once. Simulated devices share the cores of
    the machine: they show what a layout does, not how fast it is.

    Raises ValueError for n < 1, and RuntimeError if JAX has already started without n host devices.
    """
    if n < 1:
        raise ValueError(f"n={n} devices: wanted 1 or more; pass tp*cp of the layout to try")
    if not _started():
        jax.config.update(_COUNT, max(n, getattr(jax.config, _COUNT)))
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "cpu" or jax.device_count() < n:
        raise RuntimeError(
            f"n={n} devices: JAX has already started, with {jax.device_count()} {jax.default_backend()} device(s); "
            "restart Python (in a notebook, the kernel) and call simulate_devices before anything else uses JAX"
        )


def simulated_devices(n: int = 8) -> Any:
    """A session-wide pytest fixture: the list of n host devices. For a conftest.py, before its tests use JAX:

    `devices = kimi_jax.testing.simulated_devices(8)`

    Raises what `simulate_devices` raises.
    """
    import pytest

    simulate_devices(n)

    @pytest.fixture(scope="session")
    def devices():
        return jax.devices()[:n]

    return devices


def _started() -> bool:
    """Whether JAX has counted its devices. It has no question for that, but refuses another count from then on."""
    count = getattr(jax.config, _COUNT)
    try:
        jax.config.update(_COUNT, count + 1)
    except RuntimeError:
        return True
    jax.config.update(_COUNT, count)
    return False
