"""`parity`: does a layout compute what one device does? A table of cases with a verdict, for people who change a rule.

A case is a layout and a way to feed the prompts: in chunks of so many columns, some of them padding, so many rows at a
time. Runs and comparisons are in `runs`; nothing here compiles or spells a mesh.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product, repeat
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from kimi_jax import tables
from kimi_jax.checkpoints import folders
from kimi_jax.comparing.runs import Place, capacity, compare, read_golden, run, run_alone
from kimi_jax.config import Config
from kimi_jax.generation.prompting import Prompt, as_list, encode
from kimi_jax.loading import SHIPPED, load, random_model
from kimi_jax.model import guard, sizes
from kimi_jax.placement import describe, layout_json
from kimi_jax.processes import is_first
from kimi_jax.runtime import Model
from sharding_rules import SINGLE, Layout, axes, helix, valid_meshes

EXACT = 1e-5  # of the largest logit: two orders of summation in float32
GOLDEN = 2e-4  # float32 against a float64 oracle
LENGTHS = (1, 5, 17, 37)  # of the prompts, unless some are given
SHORT_BLOCKS = helix(tokens_per_block=4)  # so that prompts this short reach every stripe


@dataclass(frozen=True)
class Case:
    """How one layout did, fed in one way.

    error: the worst of the logits, as a part of the largest one; `tolerance`: how much may be.
    layer: the first whose output differs by more than the tolerance (of that output's largest value): an index,
        "embedding", or "head" if the logits differ and no layer does. None if nothing does, or if the reference has no
        hidden states.
    token: (prompt, new token), the first that differs, at a near tie only if none differs elsewhere.
    near_tie: every token that differs does so where its logit and that of the right one are closer than two errors of
        the size of the tolerance: either is right, and the case does not fail.
    near_routings: tokens, counted once a MoE layer, of which the last expert chosen and the first left out are closer
        than the tolerance, in the reference (of a file that has no scores: in the case itself).
    """

    layout: Layout
    chunk: int
    padding: int
    batch: int
    tolerance: float
    error: float
    layer: Place | None
    token: tuple[int, int] | None
    near_tie: bool
    near_routings: int

    @property
    def ok(self) -> bool:
        """Logits within the tolerance, and the same tokens or equally good ones."""
        return self.error <= self.tolerance and (self.token is None or self.near_tie)


@dataclass(frozen=True, repr=False)
class Parity:
    """The cases, what they were held against, and notes about what they cannot have seen."""

    cases: tuple[Case, ...]
    reference: str
    config: Config
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every case passes."""
        return all(case.ok for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """All of it as values that json can write."""
        cases = [{**asdict(c), "layout": layout_json(c.layout), "ok": c.ok} for c in self.cases]
        return {"ok": self.ok, "reference": self.reference, "cases": cases, "notes": self.notes}

    def __repr__(self) -> str:
        return "\n".join([self._title(), "", tables.text(*self._table()), "", *self.notes, self._verdict()])

    def _repr_html_(self) -> str:
        said = tables.paragraph("\n".join([*self.notes, self._verdict()]))
        return tables.html(self._title(), *self._table()) + said

    def _title(self) -> str:
        return f"float32 against {self.reference}, within {self.cases[0].tolerance:g} of the largest logit"

    def _verdict(self) -> str:
        bad = [case for case in self.cases if not case.ok]
        if not bad:
            return f"pass: {len(self.cases)} cases, worst error {max(c.error for c in self.cases):.1e}"
        worst = max(bad, key=lambda case: case.error)
        return (
            f"FAIL: {len(bad)} of {len(self.cases)} cases, worst error {worst.error:.1e} on {describe(worst.layout)}; "
            f"first to differ there: {self._place(worst.layer)}"
        )

    def _table(self):
        header = (
            "layout", "block", "chunk", "padding", "batch", "worst error", "first layer", "first token",
            "near routings", "",
        )  # fmt: skip
        rows = [
            (
                describe(c.layout), str(c.layout.tokens_per_block), str(c.chunk), str(c.padding), str(c.batch),
                f"{c.error:.1e}", self._place(c.layer),
                "" if c.token is None else f"{c.token[1]} of prompt {c.token[0]}" + " (near tie)" * c.near_tie,
                str(c.near_routings), "ok" if c.ok else "FAIL",
            )
            for c in self.cases
        ]  # fmt: skip
        return header, rows

    def _place(self, layer: Place | None) -> str:
        if not isinstance(layer, int):
            return layer or ""
        return f"layer {layer} ({'MLA' if self.config.is_mla(layer) else 'KDA'})"


def parity(
    checkpoint: str | Path | Config | None = None,
    layouts: Layout | Sequence[Layout] | None = None,
    *,
    prompts: Prompt | Sequence[Prompt] | None = None,
    golden: str | Path | None = None,
    chunks: Sequence[int] = (16,),
    paddings: Sequence[int] = (0, 11),
    batches: Sequence[int] = (3,),
    max_new_tokens: int = 8,
    progress: bool = True,
) -> Parity:
    """Run prompts on every layout, cut into every chunk with every padding and batch, in float32 against one device.

    checkpoint: a folder, None for the one in the package, or a Config for random weights. layouts: default
    `every_layout` of JAX's devices. prompts: default random ones of LENGTHS tokens. golden: an .npz file to compare
    with in place of one device: `ids_0`, `logits_0` (after each of them), `greedy_0` (what follows) and perhaps
    `hidden_0` (behind each layer), then `ids_1` and so on.
    chunks: columns of a call that feeds prompts. paddings: how many of them, at the end, hold junk in place of tokens.
    batches: rows of a call; prompts that do not fill the last one leave rows unused. Another chunk compiles one more
    step a layout and batch, another padding none. Decoding goes a token at a time.

    A case passes if its logits are within the tolerance of the largest one (EXACT, of a file GOLDEN) and its greedy
    tokens are the same or, at a near tie, equally good.

    Raises ValueError for a layout that does not fit the model or the devices, or an argument that makes no sense.
    """
    _check(chunks, paddings, batches, max_new_tokens, prompts, golden)
    config = checkpoint if isinstance(checkpoint, Config) else Config.from_hf(folders.locate(checkpoint or SHIPPED))
    if layouts is None:
        layouts = every_layout(config, len(jax.devices()))
    layouts = [layouts] if isinstance(layouts, Layout) else list(layouts)
    for layout in layouts:
        guard(config, layout)
        layout.mesh()
    if golden is None:
        single = _model(checkpoint, SINGLE)
        rows, tolerance = run_alone(single, _prompts(single, prompts), max_new_tokens), EXACT
    else:
        rows, tolerance = read_golden(golden, config, max_new_tokens), GOLDEN
    ways, cases = list(product(chunks, paddings, batches)), []
    with tqdm(total=len(layouts) * len(ways), unit="case", disable=not (progress and is_first())) as bar:
        for layout in layouts:
            model = _model(checkpoint, layout)
            _compile(model, {(batch, width) for chunk, _, batch in ways for width in (chunk, 1)}, capacity(rows))
            for way in ways:
                cases.append(Case(layout, *way, tolerance, *compare(rows, run(model, rows, *way), tolerance)))
                bar.update()
    reference = "one device" if golden is None else str(golden)
    return Parity(tuple(cases), reference, config, unreached(layouts, capacity(rows) - 1))


def every_layout(config: Config, ranks: int, rules: Layout = SHORT_BLOCKS) -> list[Layout]:
    """Helix on every mesh of so many ranks that fits the model, with shard_qkv_a off and, where it can be, on.

    rules: the rules and options to keep; its mesh does not matter. Raises ValueError if no mesh fits.
    """
    meshes = [mesh for mesh in valid_meshes(rules, sizes(config, rules), ranks) if math.prod(mesh) == ranks]
    if not meshes:
        guard(config, rules.resized(1, ranks))
    return [layout for mesh in meshes for layout in both_ways(config, rules.resized(*mesh))]


def both_ways(config: Config, layout: Layout) -> list[Layout]:
    """A layout, and the same with the merged q_a|kv_a projection split over all its ranks, if that can be."""
    split = layout.replace(**{axes.QKV_A: layout.mesh_axes(axes.HEADS_MERGED)})
    if layout.ranks == 1 or layout.mesh_axes(axes.QKV_A):
        return [layout]
    try:
        guard(config, split)
    except ValueError:
        return [layout]
    return [layout, split]


def unreached(layouts: Sequence[Layout], fed: int) -> tuple[str, ...]:
    """A note for each layout that has stripes which rows of up to `fed` tokens do not reach."""
    reached = {layout: min(layout.cp, -(-fed // layout.tokens_per_block)) for layout in layouts}
    return tuple(
        f"note: {describe(layout)}: rows of up to {fed} tokens reach {stripes} of {layout.cp} stripes; give longer "
        f"prompts or fewer tokens_per_block than {layout.tokens_per_block}"
        for layout, stripes in reached.items()
        if stripes < layout.cp
    )


def _check(chunks, paddings, batches, max_new_tokens, prompts, golden) -> None:
    wanted = (("chunks", 1, chunks), ("paddings", 0, paddings), ("batches", 1, batches))
    for name, least, values in (*wanted, ("max_new_tokens", 1, [max_new_tokens])):
        if not values or min(values) < least:
            raise ValueError(f"{name}={values}: whole numbers of at least {least} are wanted")
    if max(paddings) >= min(chunks):
        raise ValueError(
            f"paddings={list(paddings)}, chunks={list(chunks)}: padding {max(paddings)} leaves no column of chunk "
            f"{min(chunks)} for a token; give paddings below the smallest chunk"
        )
    if golden is not None and prompts is not None:
        raise ValueError(f"golden={str(golden)!r} brings its own prompts; leave prompts out")


def _model(checkpoint: str | Path | Config | None, layout: Layout) -> Model:
    if isinstance(checkpoint, Config):
        return random_model(checkpoint, layout=layout, dtype="float32")
    return load(checkpoint, layout=layout, dtype="float32", progress=False)


def _prompts(model: Model, prompts: Prompt | Sequence[Prompt] | None) -> list[list[int]]:
    if prompts is None:
        ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (len(LENGTHS), max(LENGTHS)))
        return [row[:length].tolist() for row, length in zip(ids, LENGTHS, strict=True)]
    return [encode(model, prompt, i) for i, prompt in enumerate(as_list(prompts))]


def _compile(model: Model, shapes: set[tuple[int, int]], capacity: int) -> None:
    """Compile the steps of these (batch, width), several at once: nearly all the time goes there."""
    batches, widths = zip(*shapes, strict=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(model.compile_observe, batches, widths, repeat(capacity)))
