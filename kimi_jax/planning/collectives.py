"""The collectives of a step: those that the layers need, by formula, and those that a compiled step has, from its text.

The two are written independently of each other, so that each can check the other (`differences`). Nothing here runs or
compiles anything.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from kimi_jax.config import Config
from kimi_jax.layers.mla import attention_heads
from sharding_rules import Layout, axes

KINDS = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective which a part of the model needs in each of its `times` layers.

    part: "embedding", "kda", "mla", "dense", "moe" or "head". over: the logical axis whose shards take part, `ranks`
    many. values: numbers in the whole buffer, a token (for the head: a row of the batch, since only its last token
    has logits).
    """

    part: str
    times: int
    kind: str
    over: str
    ranks: int
    values: int
    dtype: str

    @property
    def payload(self) -> int:
        """Bytes of the whole buffer, a token."""
        return self.values * jnp.dtype(self.dtype).itemsize

    @property
    def sent(self) -> float:
        """Bytes that one device sends over a ring, a token: (n - 1) / n of the payload, for an all-reduce twice."""
        return _over_a_ring(self.payload, self.kind, self.ranks)


def needed(config: Config, layout: Layout, dtype: str, *, one_token: bool = True) -> tuple[Collective, ...]:
    """What one step needs, by formula; a collective among one rank is none.

        embedding   all-reduce over vocab           D        each rank looks up its own rows
        KDA         all-reduce over kda_heads       D        o_proj's partial sums
        MLA         all-gather over qkv_a           Q+R+P    only if the merged projection is split
                    all-to-all over stripes         H(X+1)   partial outputs, their statistics; X = R or, in prefill, V
                    all-reduce over heads_merged    D        o_proj's partial sums
        dense       all-reduce over hidden          D        summed in float32
        MoE         all-reduce over experts         D        routed and shared experts, summed in float32
        latent MoE  all-reduce over experts         Z+D      both sums side by side, in float32
                    all-gather over latent_moe      Z        only if its projections are split: the experts' input
                    all-reduce over latent_moe      D        and what becomes of their sum, in float32
        head        all-gather over vocab           W        logits in float32

    one_token: a decode step, which exchanges latents; a prefill exchanges values.
    """
    D, R, P = config.hidden_size, config.kv_lora_rank, config.qk_rope_head_dim
    heads = attention_heads(config, layout) // layout.shards(axes.HEADS)
    merged = (config.q_lora_rank or 0) + R + P
    exchanged = heads * ((R if one_token else config.v_head_dim) + 1)
    latent = config.routed_expert_hidden_size or 0
    dense = sum(not config.is_moe(i) for i in range(config.num_hidden_layers))
    kda, mla, moe = len(config.kda_layers), len(config.mla_layers), config.num_hidden_layers - dense
    rows = [
        ("embedding", 1, "all-reduce", axes.VOCAB, D, dtype),
        ("kda", kda, "all-reduce", axes.KDA_HEADS, D, dtype),
        ("mla", mla, "all-gather", axes.QKV_A, merged, dtype),
        ("mla", mla, "all-to-all", axes.STRIPES, exchanged, "float32"),
        ("mla", mla, "all-reduce", axes.HEADS_MERGED, D, dtype),
        ("dense", dense, "all-reduce", axes.HIDDEN, D, "float32"),
        ("moe", moe, "all-gather", axes.LATENT_MOE, latent, dtype),
        ("moe", moe, "all-reduce", axes.EXPERTS, D + latent, "float32"),
        ("moe", moe if latent else 0, "all-reduce", axes.LATENT_MOE, D, "float32"),
        ("head", 1, "all-gather", axes.VOCAB, config.vocab_size, "float32"),
    ]
    return tuple(
        Collective(part, times, kind, over, layout.shards(over), values, of)
        for part, times, kind, over, values, of in rows
        if times and values and layout.shards(over) > 1
    )


class Found(NamedTuple):
    """One collective in the text of a compiled step.

    buffers: (dtype, shape) of each array that it gives. ranks: devices in one group. scope: the named scopes it came
    from. widened: XLA's CPU backend reduces bfloat16 in float32.
    """

    kind: str
    buffers: tuple[tuple[str, tuple[int, ...]], ...]
    ranks: int
    scope: str
    widened: bool = False

    @property
    def values(self) -> int:
        """Numbers in all buffers."""
        return sum(math.prod(shape) for _, shape in self.buffers)

    @property
    def sent(self) -> float:
        """Bytes that one device sends over a ring, as `Collective.sent`."""
        size = sum(_itemsize(dtype) * math.prod(shape) for dtype, shape in self.buffers) / (2 if self.widened else 1)
        return _over_a_ring(size, self.kind, self.ranks)


def read(text: str) -> list[Found]:
    """The collectives in the text of an XLA module (`compiled.as_text()`), in order; asynchronous ones count once."""
    partitions = re.search(r"num_partitions=(\d+)", text)
    return list(_read(text, int(partitions[1]) if partitions else 1))


def _over_a_ring(size: int | float, kind: str, ranks: int) -> float:
    return size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)


def _itemsize(dtype: str) -> float:
    bits = re.search(r"\d+", dtype)  # f32, bf16, s8, f8e4m3fn; pred has none
    return int(bits[0]) / 8 if bits else 1


INSTRUCTION = re.compile(rf" = (?P<result>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)")


def _read(text: str, partitions: int) -> Iterator[Found]:
    for line in text.splitlines():
        if not (match := INSTRUCTION.search(line)):
            continue
        kind, rest = match["kind"], match["rest"]
        buffers = [
            (dtype, tuple(int(n) for n in shape.split(",") if n))
            for dtype, shape in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", match["result"])
        ]
        if match["start"] and kind == "collective-permute":
            buffers = buffers[1:2]  # operand, result, two counters
        elif match["start"] and (kind == "all-gather" or match["result"].startswith("((")):
            buffers = buffers[len(buffers) // 2 :]  # the operands come first
        scope = re.search(r'op_name="([^"]*)"', rest)
        yield Found(kind, tuple(buffers), _ranks(rest, partitions), scope[1] if scope else "", "_promoted" in rest)


def _ranks(attributes: str, partitions: int) -> int:
    """Devices in one of the groups, from any of the forms in which XLA writes them."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return len(set(re.findall(r"\d+", pairs[1])))
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(tiled[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    return partitions


def part_of(scope: str, config: Config) -> str:
    """Which part of the model a scope names, in the words of `Collective.part`; the scope itself if none."""
    if layer := re.search(r"layer_(\d+)/(?:jit\(\w+\)/)?(\w+)", scope):
        index, phase = int(layer[1]), layer[2]
        attention = next((kind for kind in ("kda", "mla") if phase.startswith(kind)), None)
        if attention is None and phase in ("mlp", "route", "experts", "latent_down", "latent_up"):
            return "moe" if config.is_moe(index) else "dense"
        return attention or phase
    for word, part in (("embed", "embedding"), ("head", "head")):
        if f"/{word}/" in f"/{scope}/":
            return part
    return scope or "unnamed"


def differences(
    found: Sequence[Found], wanted: Sequence[Collective], config: Config, batch: int, length: int
) -> list[str]:
    """What a compiled step of `batch` x `length` tokens has and should not, or lacks; empty if it is as `needed` says.

    What a compiled step does among one rank moves nothing and is left out.
    """
    has = Counter((part_of(f.scope, config), f.kind, f.ranks, f.values) for f in found if f.ranks > 1)
    should: Counter = Counter()
    for c in wanted:
        tokens = batch if c.part == "head" else batch * length
        should[c.part, c.kind, c.ranks, c.values * tokens] += c.times
    return [
        f"{part}: {has[key]} x {kind} of {values:,} values over {ranks} ranks, {should[key]} by formula"
        for key in sorted(has.keys() | should.keys())
        for part, kind, ranks, values in [key]
        if has[key] != should[key]
    ]
