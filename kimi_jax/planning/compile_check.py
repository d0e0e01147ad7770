"""A plan held against the step that XLA makes of it: lower and compile it from shapes alone, then read what came out.

`check` needs as many devices as the layout has ranks; `check_apart` simulates them in a process of its own, so that
it works on any machine. No weight and no cache is ever made.
"""

import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kimi_jax import tables
from kimi_jax.checkpoints.report import peak_resident
from kimi_jax.config import Config
from kimi_jax.ops.attention import KEY_BLOCK
from kimi_jax.placement import declared, describe, held, layout_json
from kimi_jax.planning import estimate
from kimi_jax.planning.collectives import Found, differences, needed, part_of, read
from kimi_jax.planning.plan import Plan, plan
from kimi_jax.runtime import Model
from kimi_jax.tables import human
from sharding_rules import Layout

ROOT = Path(__file__).parents[1]
CACHE = "jax_compilation_cache_dir"
WAIT = 3600  # seconds for the other process
# Nothing will run, so the machine code may be poor; sharding, fusion and buffers are decided before.
QUICKLY = " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclass(frozen=True, repr=False)
class Check:
    """What the compiled step says beside what the plan says.

    collectives: those in the step's text. differences: where they are not what the formula says, in words. arguments:
    bytes a device that the step takes in, `planned` by the plan. temporary: bytes a device that XLA holds besides
    (its CPU backend also widens bfloat16 weights), `estimated` for a step of this length. seconds: to lower and
    compile. peak_resident: bytes that the compiling process held at most.
    """

    length: int
    collectives: tuple[Found, ...]
    differences: tuple[str, ...]
    arguments: int
    planned: int
    temporary: int
    estimated: int
    seconds: float
    peak_resident: int

    @property
    def agrees(self) -> bool:
        """Whether the formulas hold: the same collectives, and the same bytes to the last one."""
        return not self.differences and self.arguments == self.planned

    def to_json(self) -> dict[str, Any]:
        """All of it as values that json can write."""
        found = [f._asdict() for f in self.collectives]
        return {**dataclasses.asdict(self), "collectives": found, "agrees": self.agrees}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Check":
        """The inverse of `to_json`."""
        found = [
            Found(**{**f, "buffers": tuple((dtype, tuple(shape)) for dtype, shape in f["buffers"])})
            for f in values["collectives"]
        ]
        rest = {k: v for k, v in values.items() if k not in ("agrees", "collectives", "differences")}
        return cls(**rest, collectives=tuple(found), differences=tuple(values["differences"]))

    def __repr__(self) -> str:
        tokens = f"{self.length} token{'s' if self.length > 1 else ''} a row"
        same = "as planned, to the byte" if self.arguments == self.planned else f"but planned were {self.planned:,}"
        verdict = "as the formula says" if not self.differences else "NOT as the formula says:"
        return "\n".join(
            [
                f"compiled a step of {tokens} in {self.seconds:.1f} s; peak memory {human(self.peak_resident)}",
                f"  takes in     {self.arguments:,} bytes a device, {same}",
                f"  temporary    {human(self.temporary)} (CPUs widen bfloat16); estimated {human(self.estimated)}",
                f"  collectives  {len(self.collectives)}, {verdict}",
                *(f"    {line}" for line in self.differences),
            ]
        )


def check(plan: Plan, *, length: int = 1, devices: Any = None) -> Check:
    """Compile the plan's step on this process's devices; `length` tokens a row, 1 for decode."""
    model = Model(plan.config, plan.layout, plan.dtype, devices)
    began = time.perf_counter()
    compiled = compile_step(model, plan.batch, plan.context, length)
    seconds = time.perf_counter() - began
    found = tuple(read(compiled.as_text()))
    memory = compiled.memory_analysis()
    wanted = needed(plan.config, plan.layout, plan.dtype, one_token=length == 1)
    lengths = plan.batch * (length + 2) * 4  # tokens, counts and the cache's lengths, int32 on each device
    tile = KEY_BLOCK if model.mesh.devices.flat[0].platform == "cpu" else estimate.TILE
    kept = plan.weights + plan.kv_cache + plan.kda_state + plan.conv_state
    return Check(
        length,
        found,
        tuple(differences(found, wanted, plan.config, plan.batch, length)),
        arguments=memory.argument_size_in_bytes,
        planned=kept + lengths - _unread(plan),
        temporary=memory.temp_size_in_bytes,
        estimated=estimate.step(plan.config, plan.layout, plan.batch, length, plan.dtype, tile=tile),
        seconds=seconds,
        peak_resident=peak_resident(),
    )


def check_apart(plan: Plan, *, length: int = 1) -> Check:
    """`check` in another process, with as many simulated host devices as the plan has ranks.

    Raises RuntimeError with the end of that process's messages if it fails.
    """
    job = {
        "config": plan.config.to_hf(), "layout": layout_json(plan.layout), "batch": plan.batch, "context": plan.context,
        "dtype": plan.dtype, "length": length, "cache": getattr(jax.config, CACHE),
    }  # fmt: skip
    code = "\n".join(
        [
            f"import os, sys; sys.path.insert(0, {str(ROOT)!r})",
            f"os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + {QUICKLY!r}",
            f"import kimi_jax; kimi_jax.simulate_devices({plan.layout.ranks})",
            "from kimi_jax.planning.compile_check import answer; answer()",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, timeout=WAIT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"compiling {describe(plan.layout)} failed:\n{done.stderr[-2000:]}")
    return Check.from_json(json.loads(done.stdout.splitlines()[-1]))


def answer() -> None:
    """The other process: a job on standard input, its Check as one line of JSON on standard output."""
    job = json.load(sys.stdin)
    if job["cache"]:
        jax.config.update(CACHE, job["cache"])
    rules = tuple((name, tuple(to)) for name, to in job["layout"].pop("rules").items())
    made = plan(
        Config.from_hf(job["config"]), Layout(rules=rules, **job["layout"]), batch=job["batch"], context=job["context"],
        dtype=job["dtype"],
    )  # fmt: skip
    print(json.dumps(check(made, length=job["length"]).to_json()))


def compile_step(model: Model, batch: int, capacity: int, length: int = 1) -> Any:
    """The executable which feeds `length` tokens a row to a model that may have no weights; nothing is run."""
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, length), (batch,)))
    return model._extend.compile(model.param_structs(), tokens, counts, model.cache_structs(batch, capacity))


def _unread(plan: Plan) -> int:
    """Bytes a device of weights which a step never takes in: the first layer has no earlier sum to mix."""
    return sum(
        held(plan.layout, parameter, parameter.axes)
        for path, parameter in declared(plan.config, plan.layout, plan.dtype)
        if path[:2] == ("layers", 0) and path[2].startswith("attention_res")
    )


def collective_table(check: Check, config: Config) -> str:
    """The compiled step's collectives, alike ones in one line; widened: bfloat16 which CPUs reduce in float32."""
    kinds = Counter(
        (part_of(f.scope, config), f.kind, f.ranks, f.values, f.buffers[0][0], f.widened) for f in check.collectives
    )
    rows = [
        (part, str(times), kind, str(ranks), f"{values:,}", dtype + (" (widened)" if widened else ""))
        for (part, kind, ranks, values, dtype, widened), times in kinds.items()
    ]
    return tables.text(("compiled", "times", "collective", "ranks", "values", "dtype"), rows)
