"""How long each phase takes within the real step: the profiler's timeline of the devices, read by the compiled text.

The program that is profiled is the one that is timed, CUDA graphs and all. Inside a graph the timeline knows kernels
but not scopes, so a kernel is looked up among the compiled instructions: one that XLA made is called as its instruction
is, one written here (`kimi_jax.kernels`) as its `pallas_call` is. Equal fusions share one kernel, and run in the order
in which they are scheduled. What has no instruction of its own (cuBLAS's kernels, copies) takes the phase of both its
neighbours in time, if they agree, or of what follows a norm.
"""

import re
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData, ProfileOptions

from kimi_jax import tables
from kimi_jax.measuring.floors import NORMS, Costs, phase_of
from kimi_jax.measuring.machine import Machine, milliseconds

COLLECTIVES, UNKNOWN, BETWEEN = "collectives", "other products and copies", "between kernels"
_COLLECTIVE = re.compile(r"nccl|psum|all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective", re.I)


class Event(NamedTuple):
    """One kernel or copy on a device. instruction: the HLO instruction that started it, if the profiler knows; inside a
    CUDA graph it only knows the graph.
    """

    device: str
    name: str
    instruction: str
    start: float  # ns
    duration: float  # ns


@dataclass(frozen=True)
class Phase:
    """A part of a step. seconds: on one device (the mean of all); share: of the whole step; kernels: in a step; bytes,
    floor: what `measuring.floors` counts for it, if it counts it.
    """

    name: str
    seconds: float
    share: float
    kernels: float
    bytes: float | None = None
    floor: float | None = None


def profiled(call: Callable[[], Any], module: str) -> list[Event]:
    """What the devices do during `call`, for the XLA module of this name. Empty where JAX has no timeline (CPUs)."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            jax.block_until_ready(call())
        finally:
            jax.profiler.stop_trace()
        files = [str(file) for file in Path(folder).rglob("*.xplane.pb")]
        return [event for file in files for event in read_events(ProfileData.from_file(file), module)]


def read_events(data: Any, module: str) -> list[Event]:
    """The kernels and copies of a ProfileData, of one XLA module (and those that name none)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's own types lack a module, says Python 3.12
        return [
            Event(plane.name, event.name, about.get("hlo_op", ""), event.start_ns, event.duration_ns)
            for plane in data.planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
            if (about := _about(event)).get("hlo_module", module) == module
        ]


def _about(event: Any) -> dict[str, Any]:
    return {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module")}


def phase_times(
    events: Sequence[Event], text: str, *, steps: int, seconds: float, costs: Costs, machine: Machine
) -> list[Phase]:
    """The phases of a program whose compiled text is `text`, the longest first.

    steps: how many were profiled. seconds: of one step without the profiler, which slows the spaces between kernels:
    what the kernels leave of it is the last row. costs: of one step.
    """
    instructions, devices = Instructions(text), sorted({event.device for event in events})
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, float] = defaultdict(float)
    for device in devices:
        own = sorted((event for event in events if event.device == device), key=lambda event: event.start)
        for event, phase in zip(own, _phases_of(own, instructions), strict=True):
            spent[phase] += event.duration / 1e9 / steps / len(devices)
            count[phase] += 1 / steps / len(devices)
    rows = [
        _phase(name, spent[name], seconds, count[name], costs, machine)
        for name in sorted(spent, key=lambda name: -spent[name])
    ]
    idle = seconds - sum(spent.values())
    return [*rows, Phase(BETWEEN, idle, idle / seconds, 0.0)] if idle > 0 else rows


def _phase(name: str, spent: float, step: float, kernels: float, costs: Costs, machine: Machine) -> Phase:
    if name not in costs:
        return Phase(name, spent, spent / step, kernels)
    floor = costs[name].seconds(machine.copy_rate, machine.matrix_rate)
    return Phase(name, spent, spent / step, kernels, costs[name].bytes, floor)


def table(phases: Sequence[Phase]) -> str:
    """Phases below each other."""
    rows = [
        (p.name, milliseconds(p.seconds), f"{p.share:.1%}", f"{p.kernels:,.0f}" if p.kernels else "",
         "" if p.floor is None else milliseconds(p.floor),
         "" if p.floor is None else f"{p.floor / p.seconds:.0%}")
        for p in phases
    ]  # fmt: skip
    return tables.text(["phase", "ms", "of the step", "kernels", "floor ms", "of floor"], rows)


class Instructions:
    """The phases of a compiled module's instructions, from its text."""

    def __init__(self, text: str):
        inside: dict[str, Counter[str]] = defaultdict(Counter)  # phases in a fused computation
        found: list[tuple[str, str, str | None, str | None]] = []  # name, name of its equals, phase, computation called
        self.own: dict[str, str] = {}  # by kernel name
        self.equals: dict[str, str] = {}  # kernel name -> the name that it shares with its equals
        self.shared: dict[str, list[str]] = defaultdict(list)  # that name -> their phases, in the order of the schedule
        computation = ""
        for line in text.splitlines():
            if line[:1] in "%E" and line.endswith("{"):
                computation = line.split()[line.startswith("ENTRY")].lstrip("%")
            elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
                name, scope, calls = instruction[1], _said(line, "op_name"), re.search(r"calls=%?([\w.\-]+)", line)
                phase = phase_of(scope) if scope is not None else None
                found.append((name, _said(line, "deduplicated_name") or name, phase, calls[1] if calls else None))
                if phase is not None:
                    inside[computation][phase] += 1
                if kernel := re.search(r"/([\w.\-]+)/(pallas_call|mpmd_map)", scope or ""):
                    self.equals[kernel[1]] = kernel[1]
                    self.shared[kernel[1]].append(phase_of(scope or ""))
        for name, equals, phase, called in found:
            if phase is None and called is not None and inside[called]:
                phase = inside[called].most_common(1)[0][0]  # fused, with no scope of its own: that of most inside
            if phase is not None:
                self.own[kernel_name(name)] = phase
                self.equals[kernel_name(name)] = equals
                self.shared[equals].append(phase)

    def phase(self, event: Event, turns: Counter[str]) -> str | None:
        """The phase of an event, if it is known. turns: how often each shared kernel has run before; one is added."""
        if _COLLECTIVE.search(event.name):
            return COLLECTIVES
        if (exact := kernel_name(event.instruction)) in self.own:
            return self.own[exact]
        # As the `pallas_call` is called, but numbered where it has kernels of several shapes, and Mosaic's say so.
        written = re.sub(r"(_mosaic_gpu.*)?(__\d+)?$", "", event.name)
        if (equals := self.equals.get(event.name, self.equals.get(written))) is None:
            return None
        turns[equals] += 1
        return self.shared[equals][(turns[equals] - 1) % len(self.shared[equals])]


def _said(line: str, attribute: str) -> str | None:
    found = re.search(rf'{attribute}="([^"]*)"', line)
    return found[1] if found else None


def kernel_name(instruction: str) -> str:
    """An instruction's name as a kernel: "loop_add_fusion.2" is "loop_add_fusion_2"."""
    return re.sub(r"[.\-]", "_", instruction)


def _phases_of(events: Sequence[Event], instructions: Instructions) -> list[str]:
    """The phase of each event of one device, in the order of time."""
    turns: Counter[str] = Counter()
    known = [instructions.phase(event, turns) for event in events]
    before, after = _nearest(known), _nearest(known[::-1])[::-1]
    return [
        phase or (right if right is not None and left in (right, NORMS) else UNKNOWN)
        for phase, left, right in zip(known, before, after, strict=True)
    ]


def _nearest(known: Sequence[str | None]) -> list[str | None]:
    """For each place the last phase known up to there, collectives aside: they run where they can."""
    nearest: list[str | None] = []
    last = None
    for phase in known:
        last = phase if phase not in (None, COLLECTIVES) else last
        nearest.append(last)
    return nearest
