"""How long a call takes, and what the machine does at best: the yardsticks. Knows no model."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from kimi_jax.compiled import born
from kimi_jax.version import __version__

REPEATS = 5
IN_A_ROW = 4  # calls that are sent off before the clock waits, so that it times the device and not the sending


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the repeats, the fastest and the slowest."""

    median: float
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Machine:
    """What one device does at best: bytes read and written a second by a copy, operations a second by a product."""

    device: str
    devices: int
    copy_rate: float
    matrix_rate: float
    versions: dict[str, str]


def timed(
    call: Callable[[], Any], *, repeats: int = REPEATS, divide: int = 1, before: Callable[[], Any] = lambda: None
) -> Timing:
    """Seconds of `call`, after one that compiles and warms up; over `divide` if it does the thing several times.

    before: runs ahead of each timed call, outside the clock.
    """
    jax.block_until_ready(call())
    taken = []
    for _ in range(repeats):
        jax.block_until_ready(before())
        began = time.perf_counter()
        jax.block_until_ready(call())
        taken.append((time.perf_counter() - began) / divide)
    return Timing(statistics.median(taken), min(taken), max(taken))


def measure_machine(dtype: str) -> Machine:
    """The copy rate and, in `dtype`, the matrix rate of JAX's first device."""
    on_cpu = jax.default_backend() == "cpu"
    size, side = (1 << 27, 1536) if on_cpu else (1 << 32, 16384)
    where = SingleDeviceSharding(jax.local_devices()[0])
    source = born(_random, ((size // 4,), "float32"), where, jax.random.key(0))
    copied = timed(lambda: _last(lambda: born(_negated, None, where, source)), divide=IN_A_ROW)
    square = born(_random, ((side, side), dtype), where, jax.random.key(1))
    multiplied = timed(lambda: _last(lambda: born(_squared, None, where, square)), divide=IN_A_ROW)
    copy_rate, matrix_rate = 2 * size / copied.fastest, 2 * side**3 / multiplied.fastest
    return Machine(jax.devices()[0].device_kind, jax.device_count(), copy_rate, matrix_rate, versions())


def versions() -> dict[str, str]:
    """What is run here."""
    return {
        "kimi_jax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "backend": jax.local_devices()[0].client.platform_version.strip().replace("\n", ", "),
    }


def milliseconds(seconds: float) -> str:
    """A time to read, in ms."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _last(call: Callable[[], Any]) -> Any:
    for _ in range(IN_A_ROW - 1):
        call()
    return call()


def _random(about: tuple[tuple[int, ...], str], key: jax.Array) -> jax.Array:
    shape, dtype = about
    return jax.random.normal(key, shape, jnp.dtype(dtype))


def _negated(_: None, x: jax.Array) -> jax.Array:
    return -x


def _squared(_: None, x: jax.Array) -> jax.Array:
    return x @ x
