"""The README's pictures, made by `python notebooks/pictures.py`: the floors, one helix step, and how steps scale.

The first two are drawn from the code: from the floors that the tests hold every import to, and from the rules of who
owns a position and a head. The third is drawn from what `bench --scaling --json` wrote.
"""

import itertools
import json
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sharding_rules import axes, helix, stripes

HERE = Path(__file__).parent
SCALING = HERE / "measured" / "h200x2-scaling.json"
COLOURS = plt.color_sequences["okabe_ito"][5:] + plt.color_sequences["okabe_ito"][3:4]
WORDS = {"ha": "center", "va": "center"}
ABOUT = (
    "where things live: axes, rules, mesh, guards",
    "pure functions; the configuration",
    "flax modules with named axes",
    "embedding to logits; the cache; bytes",
    "checkpoints; text; random draws",
    "steps, and how they are compiled",
    "a model on its devices",
    "what users call",
    "what checks, times and shows it",
    "the command line",
)


def floors(names: list[set[str]]) -> Figure:
    """Floors from the lowest: each imports from its own and those below."""
    figure, axis = _page(8, 0.42 * len(names))
    for level, (parts, about) in enumerate(zip(names, ABOUT, strict=True)):
        words = "  ".join(sorted(parts - {"__init__", "__main__", "version", "strict_json", "hf_config"})) or "kimi_jax"
        colour = COLOURS[1] if level == 0 else COLOURS[0]
        axis.barh(level, 10, height=0.82, color=colour, alpha=0.12 + 0.03 * level, edgecolor=colour)
        axis.text(0.15, level, words, va="center", size=9, family="monospace")
        axis.text(9.85, level, about, va="center", ha="right", size=9, color="0.25")
    axis.annotate("", (10.25, -0.4), (10.25, len(names) - 0.6), arrowprops={"arrowstyle": "->", "lw": 1.5})
    axis.text(10.5, (len(names) - 1) / 2, "imports", rotation=270, size=10, **WORDS)
    axis.set(xlim=(0, 10.7), ylim=(-0.5, len(names) - 0.5))
    return figure


def helix_step(cp: int = 4, heads: int = 8, tokens: int = 22, block: int = 2) -> Figure:
    """One token attends over a cache dealt to `cp` ranks: stripes, partial outputs, one exchange, merged heads."""
    layout = helix(tp=1, cp=cp, tokens_per_block=block)
    chunk = heads // layout.shards(axes.HEADS_MERGED)
    figure, axis = _page(8, 3.5)
    p = np.arange(tokens)
    owner, slot = stripes.owner(p, block, cp), stripes.slot(p, block, cp)
    for position in p:
        _cell(axis, slot[position], owner[position], owner[position], str(position))
    attend, merge, out = slot.max() + 3.2, slot.max() + 4.8 + heads, slot.max() + 10.6 + heads
    for rank in range(cp):
        for head in range(heads):
            _cell(axis, attend + head, rank, rank, str(head))
        own = range(rank * chunk, (rank + 1) * chunk)
        for source in range(cp):
            for i, head in enumerate(own):
                _cell(axis, merge + 0.52 * (source * chunk + i), rank, source, str(head), width=0.5)
            ends = (attend + heads - 0.4, merge - 0.4)
            axis.plot(ends, (source, rank), color=COLOURS[source], linewidth=1, alpha=0.6)
        for i, head in enumerate(own):
            _cell(axis, out + i, rank, None, str(head))
        axis.text(-0.9, rank, f"rank {rank}", ha="right", va="center", size=9)
        for start, stop in ((slot.max() + 0.7, attend - 0.7), (merge + 4.1, out - 0.7)):
            axis.annotate("", (stop, rank), (start, rank), arrowprops={"arrowstyle": "->"})
    for x, words in (
        (slot.max() / 2, "its positions\nof the cache"),
        (attend + heads / 2 - 0.5, "attends with all heads:\npartial outputs, lse"),
        (merge + 1.75, "one all-to-all:\nits heads, from all"),
        (out + chunk / 2 - 0.5, "merged:\nexact"),
    ):
        axis.text(x, -1.15, words, size=9, **WORDS)
    axis.set(xlim=(-3.2, out + chunk), ylim=(cp - 0.4, -1.8))
    return figure


def scaling(report: dict[str, Any]) -> Figure:
    """Milliseconds of a decode step against the context, one panel a batch, one line a layout, and every floor."""
    rows = [row for row in report["rows"] if row["timed"] is not None]
    batches, contexts = (sorted({row[name] for row in rows}) for name in ("batch", "context"))
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    figure, panels = plt.subplots(1, len(batches), figsize=(8, 3.2), layout="constrained", squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        for layout, colour in zip(layouts, itertools.cycle(plt.color_sequences["okabe_ito"])):
            own = [row for row in rows if (row["batch"], row["layout"]) == (batch, layout)]
            own.sort(key=itemgetter("context"))
            x, floor = [row["context"] for row in own], [1e3 * row["timed"]["floor"] for row in own]
            y = [1e3 * row["timed"]["seconds"]["median"] for row in own]
            panel.plot(x, y, "o-", color=colour, label=layout)
            panel.plot(x, floor, ":", color=colour)
        panel.set(xscale="log", ylim=0, title=f"batch {batch}", xlabel="tokens held")
        panel.set_xticks(contexts, [f"{context:,}" for context in contexts])
        panel.minorticks_off()
    panels[0][0].set_ylabel("ms a step (dotted: floor)")
    panels[0][0].legend(frameon=False)
    return figure


def _page(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    axis.axis("off")
    return figure, axis


def _cell(axis: Axes, x: float, y: float, rank: int | None, words: str, width: float = 1.0) -> None:
    """A square of one rank's colour; None: of no rank any more."""
    colour = "0.55" if rank is None else COLOURS[rank]
    axis.barh(y, 0.92 * width, left=x - 0.46 * width, height=0.7, color=colour, alpha=0.45)
    axis.text(x, y, words, size=8, **WORDS)


def save_all(names: list[set[str]], folder: Path) -> None:
    """All as SVG, words as words, the same bytes each time."""
    figures = {"floors": floors(names), "helix-step": helix_step(), "scaling": scaling(json.loads(SCALING.read_text()))}
    for name, figure in figures.items():
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    from tests.test_floors import FLOORS

    save_all(FLOORS, HERE / "pictures")
