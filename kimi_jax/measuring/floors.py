"""What a step must read, write and compute on one device at the least, by phase, counted from shapes. Times nothing.

A phase is a part of the step that has a scope of its own in the model (`phase_of`): what is counted here and what
`measuring.phases` times go by the same names.
"""

import math
import re
from collections import defaultdict
from typing import NamedTuple

import jax.numpy as jnp

from kimi_jax.config import Config
from kimi_jax.layers.mla import attention_heads
from kimi_jax.model import Parameter
from kimi_jax.placement import declared, held
from kimi_jax.planning.estimate import DELTA_CHUNK
from kimi_jax.state import cache_shapes
from sharding_rules import Layout, axes

EMBEDDING, HEAD, OTHER = "embedding", "head", "sampling and the rest"
KDA_PROJECTIONS, KDA_MIX = "KDA projections", "KDA mix"
MLA_PROJECTIONS, ATTEND, COMBINE = "MLA projections", "attend", "combine"
ROUTE, EXPERTS, LATENT, DENSE = "route", "experts", "latent projections", "dense MLP"
NORMS, RESIDUALS = "norms and sums", "attention residuals"

# The scopes that the model sets inside a layer; the innermost that is listed decides.
SCOPES = {
    "kda_project": KDA_PROJECTIONS, "kda_output": KDA_PROJECTIONS, "kda_mix": KDA_MIX, "mla_project": MLA_PROJECTIONS,
    "mla_output": MLA_PROJECTIONS, "mla_attend": ATTEND, "combine": COMBINE, "route": ROUTE, "experts": EXPERTS,
    "latent_down": LATENT, "latent_up": LATENT, "mlp": DENSE, "attn_res": RESIDUALS, "embed": EMBEDDING, "head": HEAD,
}  # fmt: skip
_OF_KDA_MIX = ("conv", "A_log", "dt_bias", "o_norm")


class Cost(NamedTuple):
    """Bytes that pass a device's memory, and operations (a multiplication and an addition are two)."""

    bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":  # pyright: ignore[reportIncompatibleMethodOverride]  (not a longer tuple)
        return Cost(self.bytes + other.bytes, self.operations + other.operations)

    def seconds(self, copy_rate: float, matrix_rate: float) -> float:
        """The larger of both times, at these bytes and operations a second."""
        return max(self.bytes / copy_rate, self.operations / matrix_rate)


Costs = dict[str, Cost]


def phase_of(scope: str) -> str:
    """The phase that a scope path, such as "jit(run)/layer_3/mla_attend/attend/dot_general", belongs to."""
    for word in reversed(scope.split("/")):
        if word in SCOPES:
            return SCOPES[word]
    return NORMS if re.search(r"(^|/)layer_\d+(/|$)", scope) else OTHER


def decode_costs(config: Config, layout: Layout, dtype: str, batch: int, context: int, hit: float) -> Costs:
    """One decode step of `batch` rows that hold `context` tokens each.

    Every weight is read once, of the routed experts only `hit` a layer (of those that the device holds), of the
    embedding a row a token; the latent rows once; the recurrent states are read and written.
    """
    costs = _weights(config, layout, dtype, batch, batch, hit)
    costs[ATTEND] += _attention(config, layout, dtype, batch, pairs=float(batch * context), keys=batch * context)
    costs[ATTEND] += Cost(_rows(config, layout, dtype) * batch * context)
    costs[KDA_MIX] += Cost(2 * _states(config, layout, dtype, batch), _recurrence(config, layout, batch, chunk=0))
    return dict(costs)


def prefill_costs(config: Config, layout: Layout, dtype: str, batch: int, tokens: int, hit: float) -> Costs:
    """One pass over `batch` prompts of `tokens` tokens each, from an empty state to the logits after their last ones.

    Weights as in `decode_costs`, the head for one token a row; latent rows and states are written once.
    """
    fed = batch * tokens
    costs = _weights(config, layout, dtype, fed, batch, hit)
    costs[ATTEND] += _attention(config, layout, dtype, fed, pairs=fed * (tokens + 1) / 2, keys=fed)
    costs[ATTEND] += Cost(_rows(config, layout, dtype) * fed)
    states = _states(config, layout, dtype, batch)
    costs[KDA_MIX] += Cost(states, _recurrence(config, layout, fed, chunk=min(tokens, DELTA_CHUNK)))
    return dict(costs)


def total(costs: Costs) -> Cost:
    """All phases together."""
    return sum(costs.values(), Cost())


def _weights(config: Config, layout: Layout, dtype: str, tokens: int, ends: int, hit: float) -> Costs:
    """What the weights cost when `tokens` tokens meet them, and `ends` of them the head. 2 operations a weight and
    token; a token meets its chosen experts, which are spread evenly over the ranks.
    """
    costs: Costs = defaultdict(Cost)
    local = config.num_experts // layout.shards(axes.EXPERTS)
    for path, parameter in declared(config, layout, dtype):
        phase, size = _phase_of_weight(path, config), held(layout, parameter, parameter.axes)
        if phase == EMBEDDING:
            costs[phase] += Cost(tokens * size / layout.shard_shape(parameter.shape, *parameter.axes)[0])
            continue
        if phase == ATTEND:  # what k_b and v_b compute depends on the form: `_attention`
            costs[phase] += Cost(size)
            continue
        meets = ends if phase == HEAD else tokens
        share = 1.0
        if str(path[-1]).startswith("experts_"):
            share, meets = hit / local, tokens * config.num_experts_per_token / config.num_experts
        costs[phase] += Cost(share * size, 2 * meets * _multiplied(path, parameter, layout))
    return costs


def _phase_of_weight(path: tuple, config: Config) -> str:
    if path[0] != "layers":
        return EMBEDDING if path[0] == "embed" else HEAD
    _, layer, block, *rest = path
    if block == "attention":
        if config.is_mla(layer):
            return ATTEND if rest[0] in ("k_b", "v_b") else MLA_PROJECTIONS
        return KDA_MIX if rest[0] in _OF_KDA_MIX else KDA_PROJECTIONS
    if block != "ffn":
        return RESIDUALS if "_res_" in block else NORMS
    if not config.is_moe(layer):
        return DENSE
    return ROUTE if rest[0].startswith("router") else LATENT if rest[0].startswith("latent") else EXPERTS


def _multiplied(path: tuple, parameter: Parameter, layout: Layout) -> int:
    """Weights of a matrix on one device; none of what only scales or shifts. A packed byte holds two."""
    if len(parameter.shape) == 1 or str(path[-1]).endswith("_scale"):
        return 0
    packed = 2 if str(path[-1]).endswith("_packed") else 1
    return packed * math.prod(layout.shard_shape(parameter.shape, *parameter.axes))


def _attention(config: Config, layout: Layout, dtype: str, queries: int, *, pairs: float, keys: int) -> Cost:
    """Of all MLA layers: the form with fewer operations, over this device's heads h = H / tp and its part of the keys.

        absorbed   2 h (2R + P) a pair,    2 h K R a query, 2 (H / ranks) V R a query after the combine
        expanded   2 h (K + P + V) a pair, 2 h R (K + V) a key

    pairs: of a query and a key that it sees; keys: that exist, all rows together. In the absorbed form only the value
    half of the heads that a rank owns after the combine is read: the rest of v_b is given back.
    """
    R, P, V, K = config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim, config.qk_nope_head_dim
    heads, stripes = attention_heads(config, layout), layout.shards(axes.STRIPES)
    h, owned, layers = heads // layout.shards(axes.HEADS), heads // layout.shards(axes.HEADS_MERGED), config.mla_layers
    absorbed = pairs / stripes * h * (2 * R + P) + queries * R * (h * K + owned * V)
    expanded = pairs / stripes * h * (K + P + V) + keys / stripes * h * R * (K + V)
    unread = (h - owned) * V * R * jnp.dtype(dtype).itemsize if absorbed <= expanded else 0
    return Cost(-len(layers) * unread, 2 * len(layers) * min(absorbed, expanded))


def _rows(config: Config, layout: Layout, dtype: str) -> float:
    """Bytes of a token's latent rows, all MLA layers, on one device (a stripe holds its share of the tokens)."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    return len(config.mla_layers) * width * jnp.dtype(dtype).itemsize / layout.shards(axes.STRIPES)


def _states(config: Config, layout: Layout, dtype: str, batch: int) -> int:
    """Bytes of the KDA layers' convolution and recurrent states on one device."""
    cache = cache_shapes(config, layout, batch, 1, dtype)
    return sum(
        held(layout, getattr(cache.layers[layer], name), field.metadata["axes"])
        for layer in config.kda_layers
        for name, field in cache.layers[layer].__dataclass_fields__.items()
    )


def _recurrence(config: Config, layout: Layout, tokens: int, *, chunk: int) -> float:
    """Operations of the delta rule: a token and head reads the state twice and updates it, 6 K^2; within a chunk of C
    tokens there are (C + 1) / 2 visible pairs a token, which meet in five products of width K (k k^T, q k^T, its
    solution for w and u, the output).
    """
    heads, K = config.kda_num_heads // layout.shards(axes.KDA_HEADS), config.kda_head_dim
    within = 10 * K * (chunk + 1) / 2 if chunk else 0
    return len(config.kda_layers) * tokens * heads * (6.0 * K * K + within)
