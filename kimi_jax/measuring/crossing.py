"""What a scaling run found: its lines, and from which context on it pays to split the cache."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kimi_jax import tables
from kimi_jax.measuring.machine import Machine, milliseconds
from kimi_jax.measuring.timing import Row
from kimi_jax.tables import human

COUNTED = "CPUs: nothing is timed, bytes and collectives are counted"


@dataclass(frozen=True)
class Scaled:
    """A decode step under one layout.

    bytes: on a device, for rows of `context` tokens and those that the timing adds. collectives: of a step as it was
    compiled; sent: bytes that a device sends for them. timed: None if it was only counted. in_collectives: seconds of a
    step, the mean of the devices; None without a timeline.
    """

    layout: str
    ranks: int
    tp: int
    cp: int
    batch: int
    context: int
    bytes: int
    collectives: int
    sent: float
    timed: Row | None = None
    in_collectives: float | None = None


@dataclass
class Report:
    """All layouts. machine: None if nothing was timed. left_out: what was not run, and why."""

    model: dict[str, Any]
    machine: Machine | None
    rows: list[Scaled] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def crossovers(self) -> list[dict[str, Any]]:
        """For each number of ranks and each batch, the context from which the best layout that splits the cache is
        faster than the best that does not; None where it is not. Left out where only one kind was timed.
        """
        found = []
        for ranks, batch in sorted({(row.ranks, row.batch) for row in self.rows if row.ranks > 1}):
            whole, split = (
                self._best(ranks, batch, among) for among in (lambda row: row.cp == 1, lambda row: row.cp > 1)
            )
            if whole.keys() & split.keys():
                found.append({"ranks": ranks, "batch": batch, "context": crossover(whole, split)})
        return found

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({**asdict(self), "crossovers": self.crossovers}, indent=1)

    def __repr__(self) -> str:
        head = f"{self.model['layers']} layers, {self.model['dtype']}; "
        head += f"{self.machine.devices} x {self.machine.device}" if self.machine else COUNTED
        titles = ["layout", "batch", "context", "a device", "collectives", "sent B a device"]
        titles += ["ms", "of floor", "in collectives ms", "of one device"] if self.machine else []
        crossed = [
            f"{c['ranks']} ranks, batch {c['batch']}: "
            + ("cp does not pay" if c["context"] is None else f"cp pays from context {c['context']:,.0f} on")
            for c in self.crossovers
        ]
        return "\n".join([head, tables.text(titles, [self._line(row) for row in self.rows]), *crossed, *self.left_out])

    def _line(self, row: Scaled) -> tuple[str, ...]:
        counted = (
            row.layout, str(row.batch), f"{row.context:,}", human(row.bytes), str(row.collectives), f"{row.sent:,.0f}",
        )  # fmt: skip
        if row.timed is None:
            return (*counted, *[""] * 4) if self.machine else counted
        seconds, one = row.timed.seconds.median, self._best(1, row.batch, lambda row: True).get(row.context)
        return (
            *counted,
            milliseconds(seconds),
            f"{row.timed.floor / seconds:.0%}",
            "" if row.in_collectives is None else milliseconds(row.in_collectives),
            "" if one is None else f"{one / seconds:.2f}x",
        )

    def _best(self, ranks: int, batch: int, among: Callable[[Scaled], bool]) -> dict[int, float]:
        """The fewest seconds at each context of the layouts of so many ranks."""
        best: dict[int, float] = {}
        for row in self.rows:
            if row.timed is not None and (row.ranks, row.batch) == (ranks, batch) and among(row):
                best[row.context] = min(row.timed.seconds.median, best.get(row.context, float("inf")))
        return best


def crossover(whole: Mapping[int, float], split: Mapping[int, float]) -> float | None:
    """The context from which `split` takes fewer seconds than `whole`, of those that both have, up to the longest.

    Between two contexts both are taken to be straight lines: what attention reads grows with the context. The first
    context if `split` is faster from there on, None if it is slower at the longest.
    """
    contexts = sorted(whole.keys() & split.keys())
    gains = [whole[context] - split[context] for context in contexts]
    if not contexts or gains[-1] <= 0:
        return None
    last = max((i for i, gain in enumerate(gains) if gain <= 0), default=None)
    if last is None:
        return float(contexts[0])
    near, far = contexts[last], contexts[last + 1]
    return near + (far - near) * -gains[last] / (gains[last + 1] - gains[last])
