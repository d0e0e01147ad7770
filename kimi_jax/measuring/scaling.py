"""How a decode step scales: every (tp, cp) of the devices that are here, at several batches and contexts.

A layout's model is made once, and one compiled loop a batch serves all contexts: its cost follows the tokens that rows
hold, not the room they have. On CPUs, simulated or not, nothing is timed: bytes and collectives are counted, the
latter in the compiled step.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from kimi_jax import processes
from kimi_jax.config import Config
from kimi_jax.loading import random_model
from kimi_jax.measuring.crossing import Report, Scaled
from kimi_jax.measuring.machine import Machine, measure_machine, versions
from kimi_jax.measuring.phases import COLLECTIVES
from kimi_jax.measuring.rank_slice import leading
from kimi_jax.measuring.timing import Decoding, Row, room
from kimi_jax.model import guard
from kimi_jax.placement import describe
from kimi_jax.planning import estimate
from kimi_jax.planning.collectives import Found, read
from kimi_jax.planning.compile_check import compile_step
from kimi_jax.planning.devices import GIB, RESERVED
from kimi_jax.planning.plan import plan
from kimi_jax.runtime import Model
from kimi_jax.tables import human
from sharding_rules import Layout, helix

RANKS = (1, 2, 4, 8)
BATCHES, CONTEXTS = (1, 4, 16), (8192, 131_072, 1_048_576)
MINUTES = 9.0


def run(
    config: Config,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    dtype: str | None = None,
    ranks: Sequence[int] = RANKS,
    layers: int | None = None,
    minutes: float = MINUTES,
    after_each: Callable[[Report], Any] = lambda report: None,
) -> Report:
    """Every layout of so many ranks on this process's devices, as far as `plan` says that it fits.

    layers: only the first so many of the model; None: all, or if they fit on no layout as many as fit on the largest.
    minutes: no layout is begun that would probably not be done by then. after_each: sees the report so far after each
    layout.

    Raises ValueError in one of several processes: their clocks would not agree on the end.
    """
    if not processes.alone():
        raise ValueError("bench --scaling runs in one process that sees all devices of its host")
    began, dtype = time.monotonic(), dtype or config.dtype
    devices = jax.local_devices()
    cases = [(batch, context) for batch in batches for context in contexts]
    config = leading(config, layers or _layers_that_fit(config, len(devices), cases, dtype, limit(devices)))
    counted = jax.default_backend() == "cpu"
    machine = None if counted else measure_machine(dtype)
    about = {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "dtype": dtype,
        "versions": versions(),
    }
    report, longest = Report(about, machine), 0.0
    for layout in layouts(config, len(devices), ranks):
        if (time.monotonic() - began + longest) / 60 > minutes:
            report.left_out.append(f"{describe(layout)}: not begun, {minutes:g} minutes would not have been enough")
            continue
        start = time.monotonic()
        fits, misfits = sort_out(config, layout, cases, dtype, limit(devices))
        report.left_out += misfits
        if fits and machine is None:
            report.rows += count(config, layout, fits, dtype)
        elif fits and machine is not None:
            report.rows += measure(config, layout, fits, dtype, machine)
        longest = max(longest, time.monotonic() - start)
        after_each(report)
    return report


def layouts(config: Config, devices: int, ranks: Sequence[int] = RANKS) -> list[Layout]:
    """Every (tp, cp) of so many ranks that the model divides by, with the merged projection whole and, where there is
    one, split: one device first, then the most.
    """
    found = []
    for count in sorted((r for r in ranks if r <= devices), key=lambda r: (r > 1, -r)):
        for tp in (tp for tp in range(1, count + 1) if count % tp == 0):
            for split in (False, True) if config.q_lora_rank is not None and count > 1 else (False,):
                layout = helix(tp, count // tp, shard_qkv_a=split)
                try:
                    guard(config, layout)
                except ValueError:
                    continue
                found.append(layout)
    return found


def limit(devices: Sequence[jax.Device]) -> int | None:
    """Bytes that a device may hold, as the smallest says; None if they do not say."""
    limits = [stats["bytes_limit"] for device in devices if "bytes_limit" in (stats := device.memory_stats() or {})]
    return min(limits) - RESERVED * GIB if limits else None


def bytes_held(config: Config, layout: Layout, batch: int, context: int, dtype: str) -> int:
    """What a device holds while it decodes: as planned, but with the activations of a decode step alone."""
    made = plan(config, layout, batch=batch, context=room(context), dtype=dtype)
    return made.total - made.activations + estimate.step(config, layout, batch, 1, dtype)


def sort_out(
    config: Config, layout: Layout, cases: Sequence[tuple[int, int]], dtype: str, most: int | None
) -> tuple[dict[tuple[int, int], int], list[str]]:
    """The cases (batch, context) that fit, with the bytes of each, and words for those that do not."""
    held = {case: bytes_held(config, layout, *case, dtype) for case in cases}
    fits = {case: size for case, size in held.items() if most is None or size <= most}
    return fits, [
        f"{describe(layout)}, batch {batch}, context {context:,}: does not fit, {human(size)} a device"
        for (batch, context), size in held.items()
        if (batch, context) not in fits
    ]


def count(config: Config, layout: Layout, fits: dict[tuple[int, int], int], dtype: str) -> Iterator[Scaled]:
    """The cases of one layout, from shapes and from one compiled step a batch."""
    for batch in dict.fromkeys(batch for batch, _ in fits):
        contexts = [context for b, context in fits if b == batch]
        found = read(compile_step(Model(config, layout, dtype), batch, room(min(contexts))).as_text())
        for context in contexts:
            yield scaled(layout, batch, context, fits[batch, context], found)


def measure(
    config: Config, layout: Layout, fits: dict[tuple[int, int], int], dtype: str, machine: Machine
) -> Iterator[Scaled]:
    """The cases of one layout, timed. The loops of all batches are compiled at once, on the host's cores."""
    model = random_model(config, layout=layout, dtype=dtype)
    longest = {batch: max(context for b, context in fits if b == batch) for batch, _ in fits}
    loops = {batch: Decoding(model, batch, room(context)) for batch, context in longest.items()}
    with ThreadPoolExecutor(len(loops)) as pool:
        list(pool.map(Decoding.compile, loops.values()))
    for batch, loop in loops.items():
        found = read(loop.text())
        for context in sorted(context for b, context in fits if b == batch):
            row = loop.time(machine, context, phases=True)
            yield scaled(layout, batch, context, fits[batch, context], found, row)
        loop.state = None  # its room is needed


def scaled(
    layout: Layout, batch: int, context: int, size: int, found: Sequence[Found], row: Row | None = None
) -> Scaled:
    """One line of the report."""
    many = [f for f in found if f.ranks > 1]
    phases = {} if row is None else {phase.name: phase.seconds for phase in row.phases or ()}
    spent = phases.get(COLLECTIVES, 0.0) if phases else None
    mesh = (layout.ranks, layout.tp, layout.cp)
    return Scaled(
        describe(layout), *mesh, batch, context, size, len(many), sum((f.sent for f in many), 0.0), row, spent
    )


def _layers_that_fit(
    config: Config, devices: int, cases: Sequence[tuple[int, int]], dtype: str, most: int | None
) -> int:
    """All layers if some case of some layout fits; else the most with which all cases fit on the one that stripes most.

    Raises ValueError if not even one layer fits.
    """
    total, here = config.num_hidden_layers, layouts(config, devices)
    if most is None or any(bytes_held(config, layout, *case, dtype) <= most for layout in here for case in cases):
        return total
    widest = max(here, key=lambda layout: (layout.ranks, layout.cp))

    def fit(layers: int) -> bool:
        cut = leading(config, layers)
        return all(bytes_held(cut, widest, *case, dtype) <= most for case in cases)

    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    if low == 0:
        raise ValueError(f"not one layer fits {devices} devices of {human(most)} at these batches and contexts")
    return low
