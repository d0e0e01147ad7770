"""What several processes have to do together, under jax.distributed; one process is the same code, and pays nothing.

Every process runs the same program. What it decides on the host must be the same everywhere, or the devices wait for
each other for ever: `agree` checks the arguments of a call, and clocks decide nothing. Must not know models.
"""

import contextlib
import hashlib
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import ArrayLike
from jaxtyping import Array

from sharding_rules import whole_number

START_SECONDS = 300  # how long a process waits for the others to start
HEARTBEAT_SECONDS = 30  # how long a process may be silent before the others end
PATIENCE = 3.0  # seconds before a wait is explained
SLOTS, DIGEST = 16, 8  # of `agree`: things compared at once, bytes of each digest


def join(coordinator: str, processes: int, process_id: int, *, timeout: int = START_SECONDS) -> None:
    """Become one of several processes: `jax.distributed.initialize`, saying for whom it waits. Before JAX starts.

    coordinator: HOST:PORT of process 0, the same for all. timeout: seconds to wait for the others.

    Raises ValueError for arguments that cannot be meant, TimeoutError if process 0 does not answer. If it is another
    one that does not come, JAX ends the program.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"coordinator={coordinator!r}: HOST:PORT of process 0 was wanted")
    processes = whole_number("processes", processes)
    process_id = whole_number("process_id", process_id, least=0, most=processes - 1)
    me, until = f"process {process_id} of {processes}", time.monotonic() + timeout
    if process_id:
        with _explained(f"{me} waits for process 0 at {coordinator}, up to {timeout} s"):
            while not _answers(host, int(port)):
                if time.monotonic() > until:
                    raise TimeoutError(f"coordinator={coordinator}: process 0 did not answer {me} within {timeout} s")
                time.sleep(0.2)
    others = ", ".join(str(i) for i in range(processes) if i != process_id)
    with _explained(f"{me} waits for process {others} to come to {coordinator}, up to {timeout} s"):
        jax.distributed.initialize(
            coordinator, processes, process_id,
            initialization_timeout=max(1, int(until - time.monotonic())),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip


@contextlib.contextmanager
def _explained(why: str) -> Iterator[None]:
    """Print why the block takes long, if it does."""
    over = threading.Event()

    def explain() -> None:
        if not over.wait(PATIENCE):
            print(why, file=sys.stderr, flush=True)

    threading.Thread(target=explain, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def is_first() -> bool:
    """Whether this is the process that prints and that writes what is written once."""
    return jax.process_index() == 0


def name() -> str:
    """Which process this is, in words."""
    return f"process {jax.process_index()} of {jax.process_count()}"


def alone() -> bool:
    """Whether there is no other process."""
    return jax.process_count() == 1


def agree(call: str, **said: Any) -> None:
    """Raise ValueError, on every process, unless all are in the same call with the same arguments.

    said: what must be equal, compared by `repr`. Every process must come here, so it stands before any check that one
    of them alone could fail.
    """
    if alone():
        return
    rows = [_digest((call, sorted(said))), *(_digest(value) for value in said.values())]
    table = np.zeros((SLOTS, DIGEST), np.uint8)
    table[: len(rows)] = rows
    everyone = np.asarray(multihost_utils.process_allgather(table))
    differs = (everyone != everyone[0]).any(-1)  # [processes, SLOTS]
    if not differs.any():
        return
    process, slot = (int(index) for index in np.argwhere(differs)[0])
    what = "the call itself" if slot == 0 else list(said)[slot - 1]
    raise ValueError(
        f"{call}: {what} is not the same on every process: process {process} differs from process 0; this is "
        f"{name()}. Give every process the same"
    )


def wait_for_all(what: str) -> None:
    """Return when every process has come here."""
    if not alone():
        multihost_utils.sync_global_devices(what)


def put(values: ArrayLike, sharding: Sharding) -> Array:
    """A new array on `sharding`, from values that every process has (each device takes its part) or another array."""
    if isinstance(values, jax.Array):
        return jax.device_put(values, sharding, may_alias=False)
    values = np.asarray(values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def fetch(array: Array | np.ndarray) -> np.ndarray:
    """All of an array on the host of every process, wherever its parts lie. Every process must ask."""
    apart = isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True) if apart else array)


def devices_for(ranks: int) -> list[jax.Device]:
    """The devices that so many ranks take: all processes', or if its own are enough, each process's own."""
    return jax.local_devices() if ranks <= jax.local_device_count() else jax.devices()


def check_spread(devices: list[Any]) -> None:
    """Raise ValueError unless the devices are this process's own, or every process holds some of them."""
    holding = {device.process_index for device in devices}
    if holding != {jax.process_index()} and len(holding) < jax.process_count():
        idle = sorted(set(range(jax.process_count())) - holding)
        raise ValueError(
            f"the layout's {len(devices)} ranks leave process {', '.join(map(str, idle))} of {jax.process_count()} "
            f"without a device; use all {jax.device_count()} devices (tp * cp = {jax.device_count()})"
        )


def _digest(value: Any) -> np.ndarray:
    return np.frombuffer(hashlib.blake2b(repr(value).encode(), digest_size=DIGEST).digest(), np.uint8)
