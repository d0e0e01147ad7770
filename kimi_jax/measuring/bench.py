"""Time a model on this machine, beside what the machine could do at best.

The machine is measured first, in the same run: how fast it copies and how fast it multiplies. A step's floor is the
larger of its bytes over that copy rate and its operations over that matrix rate, both counted from shapes and from the
experts that the step really hits. Times are of warm, compiled calls: the median and the range of several.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from kimi_jax import tables
from kimi_jax.measuring.machine import Machine, measure_machine, milliseconds
from kimi_jax.measuring.timing import Decoding, Row, phases_of, room, time_prefill
from kimi_jax.placement import declared
from kimi_jax.runtime import Model


@dataclass
class Report:
    """A machine and what was timed on it. peer: what the peer is, in words."""

    machine: Machine
    model: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    peer: str | None = None

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self), indent=1, default=str)

    def __repr__(self) -> str:
        head = (
            f"{self.machine.device}: copies {self.machine.copy_rate / 1e9:,.1f} GB/s (read + written), multiplies "
            f"{self.machine.matrix_rate / 1e12:,.2f} TFLOP/s in {self.model['dtype']}"
        )
        titles = "what batch context capacity ms range floor_ms of_floor experts_hit peer_ms faster"
        lines = tables.text([title.replace("_", " ") for title in titles.split()], [_line(row) for row in self.rows])
        return "\n".join([head, lines, *(phases_of(row) for row in self.rows if row.phases is not None)])


def run(
    model: Model,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    capacity: int | None = None,
    prefills: Sequence[int] = (),
    peer: Mapping[tuple[str, int, int], float] = MappingProxyType({}),
    phases: bool = False,
) -> Report:
    """Time decode at each batch and context, and prefill of each batch and length.

    peer: the peer's seconds by (what, batch, context), to stand beside ours. phases: also how long each phase takes,
    from the profiler.
    """
    rooms = {context: room(context, capacity) for context in contexts}  # first: it refuses what is too small
    report = Report(measure_machine(str(model.dtype)), describe(model))
    for batch in batches:
        for context in contexts:
            decoding = Decoding(model, batch, rooms[context])
            row = decoding.time(report.machine, context, phases=phases)
            report.rows.append(replace(row, peer=peer.get(("decode", batch, context))))
        for tokens in prefills:
            row = time_prefill(model, report.machine, batch, tokens, phases=phases)
            report.rows.append(replace(row, peer=peer.get(("prefill", batch, tokens))))
    return report


def describe(model: Model) -> dict[str, Any]:
    """What was timed, in words and numbers."""
    parameters = sum(np.prod(p.shape) for _, p in declared(model.config, model.layout, str(model.dtype)))
    return {
        "parameters": int(parameters),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "experts": f"{model.config.num_experts_per_token} of {model.config.num_experts}",
        "dtype": str(model.dtype),
        "weights": "random" if model.source is None else str(model.source.name),
        **dict(tp=model.layout.tp, cp=model.layout.cp),
    }


def _line(row: Row) -> tuple[str, ...]:
    return (
        row.what, str(row.batch), f"{row.context:,}", f"{row.capacity:,}", milliseconds(row.seconds.median),
        f"{milliseconds(row.seconds.fastest)}..{milliseconds(row.seconds.slowest)}", milliseconds(row.floor),
        f"{row.floor / row.seconds.median:.0%}",
        "" if row.experts_hit is None else f"{row.experts_hit.all:.1f}",
        "" if row.peer is None else milliseconds(row.peer),
        "" if row.peer is None else f"{row.peer / row.seconds.median:.1f}x",
    )  # fmt: skip
