"""One table between the parameters of the model and the tensors of a hub checkpoint, read both ways.

A weight keeps the hub's order of its elements, [out, in], row by row: a parameter is hub tensors stacked, joined or
split, never transposed. So a box of a parameter is runs of bytes of a file. The only file that spells hub names; must
not know files, bytes or devices.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kimi_jax.config import MXFP4_GROUP, Config

Shape = tuple[int, ...]

SKIPPED = ("vision_tower.", "mm_projector.")  # K3's image half
K3_PREFIX = "language_model."


class Piece(NamedTuple):
    """A box of one hub tensor that fills a box of one parameter.

    The tensor, of shape `hub_shape`, is read as an array of shape `view`, of the parameter's rank. Its box of `shape`
    that begins at `offset` is the parameter's box that begins at `start`. `name` follows the parameter's `prefix`.
    """

    name: str
    hub_shape: Shape
    view: Shape
    offset: Shape
    shape: Shape
    start: Shape
    open_ended: bool = False  # the stored tensor may be longer along its first axis; the rest is padding


class Parameter(NamedTuple):
    """What fills one parameter. Layers of one kind share their pieces and differ in `prefix`."""

    shape: Shape
    pieces: tuple[Piece, ...]
    fused: tuple[Piece, ...] = ()  # the same by transformers' own fused tensor, accepted in place of `pieces`
    kept: bool = False  # keeps the dtype it is stored in, whatever the model's
    packed: bool = False  # bytes (uint8), no numbers
    prefix: str = ""


def table(config: Config) -> dict[str, Parameter]:
    """Parameter path ("layers/0/attention/qkv") -> what fills it, under the hub's names without K3's prefix."""
    D, W = config.hidden_size, config.vocab_size
    rows = {
        "embed": _whole((W, D), "model.embed_tokens.weight"),
        "lm_head": _whole((W, D), "lm_head.weight"),
        "norm": _whole((D,), "model.norm.weight"),
    }
    if config.attn_res_block_size is not None:
        rows |= _residual_mix("output", D, "model.output_attn_res")
    norms, kda, mla, dense, moe = (block(config) for block in (_norms, _kda, _mla, _dense, _moe))
    for layer in range(config.num_hidden_layers):
        is_moe = config.is_moe(layer)
        for part, block, hub in (
            ("", norms, ""),
            ("attention/", mla if config.is_mla(layer) else kda, "self_attn."),
            ("ffn/", moe if is_moe else dense, "block_sparse_moe." if is_moe else "mlp."),
        ):
            prefix = f"model.layers.{layer}.{hub}"
            rows |= {f"layers/{layer}/{part}{name}": row._replace(prefix=prefix) for name, row in block.items()}
    return rows


def hub_tensors(config: Config) -> dict[str, list[tuple[str, Piece]]]:
    """The table the other way: hub tensor, as it is written -> the parameters and pieces that it is made of."""
    tensors: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for path, row in table(config).items():
        prefix = written(row.prefix, config)
        for piece in row.pieces:
            tensors[prefix + piece.name].append((path, piece))
    return dict(tensors)


def written(name: str, config: Config) -> str:
    """A name of the table as the hub spells it."""
    return K3_PREFIX + name if config.is_k3 else name


def canonical(name: str, config: Config) -> str:
    """Any accepted spelling of a hub name -> the table's.

    Accepted are K3 with and without `language_model.` and the inner `model.`, K3's early AttnRes names, the names of
    transformers' own classes, and what its exporter makes of the dense layers (`block_sparse_moe.gate_proj`).
    """
    if config.is_k3:
        name = name.removeprefix(K3_PREFIX)
        if name.startswith(("layers.", "embed_tokens.", "norm.", "output_attn_res")):
            name = f"model.{name}"
        if name.endswith("_weight"):
            name = re.sub(r"(_attention_res|mlp_res|_attn_res)\.(proj|norm)_weight$", r"\1_\2.weight", name)
    name = name.replace(".self_attn.forget_gate.", ".self_attn.")
    if found := re.match(r"(model\.layers\.(\d+)\.)(mlp|block_sparse_moe)\.(.*)", name):
        block = "block_sparse_moe" if config.is_moe(int(found[2])) else "mlp"
        return f"{found[1]}{block}.{found[4]}"
    return name


def is_skipped(name: str, config: Config) -> bool:
    """True for tensors that are left alone on purpose: the image half of K3."""
    return config.is_k3 and name.startswith(SKIPPED)


def _norms(config: Config) -> dict[str, Parameter]:
    D = config.hidden_size
    rows = {
        "attention_norm": _whole((D,), "input_layernorm.weight"),
        "ffn_norm": _whole((D,), "post_attention_layernorm.weight"),
    }
    if config.attn_res_block_size is not None:
        rows |= _residual_mix("attention", D, "self_attention_res") | _residual_mix("ffn", D, "mlp_res")
    return rows


def _residual_mix(path: str, D: int, name: str) -> dict[str, Parameter]:
    return {
        f"{path}_res_norm": _whole((D,), f"{name}_norm.weight"),
        f"{path}_res_proj": _whole((D,), f"{name}_proj.weight", (1, D)),
    }


def _kda(config: Config) -> dict[str, Parameter]:
    D, H, K, C = config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.conv_width
    k3 = config.is_k3
    a_log = _whole((H,), "A_log", (H,) if k3 else (1, 1, H, 1))
    conv = _stack((H, 3, K, C), [f"{n}_conv1d.weight" for n in "qkv"], (H * K, 1, C), axis=1)
    fused = tuple(  # transformers joins the three: rows of q, then of k, then of v
        Piece("conv1d.weight", (3 * H * K, 1, C), (3 * H, 1, K, C), (i * H, 0, 0, 0), (H, 1, K, C), (0, i, 0, 0))
        for i in range(3)
    )
    rows = {
        "qkv": _stack((H, 3, K, D), [f"{n}_proj.weight" for n in "qkv"], (H * K, D), axis=1),
        "conv": conv._replace(fused=fused, kept=k3),
        "f_a": _whole((K, D), "f_a_proj.weight"),
        "f_b": _whole((H, K, K), "f_b_proj.weight", (H * K, K)),
        "A_log": a_log._replace(pieces=(a_log.pieces[0]._replace(open_ended=True),), kept=True),
        "dt_bias": _whole((H, K), "dt_bias", (H * K,))._replace(kept=True),
        "b": _whole((H, D), "b_proj.weight"),
        "o_norm": _whole((K,), "o_norm.weight")._replace(kept=k3),
        "o": _whole((D, H, K), "o_proj.weight", (D, H * K)),
    }
    if config.use_full_rank_gate:
        return rows | {"g": _whole((H, K, D), "g_proj.weight", (H * K, D))}
    return rows | {
        "g_a": _whole((K, D), "g_a_proj.weight"),
        "g_b": _whole((H, K, K), "g_b_proj.weight", (H * K, K)),
    }


def _mla(config: Config) -> dict[str, Parameter]:
    D, H, Q, R = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    K, V, latent = config.qk_nope_head_dim, config.v_head_dim, R + config.qk_rope_head_dim
    columns = config.qk_head_dim
    if Q is None:
        rows = {
            "kv_a": _whole((latent, D), "kv_a_proj_with_mqa.weight"),
            "q": _whole((H, columns, D), "q_proj.weight", (H * columns, D)),
        }
    else:
        rows = {
            "qkv_a": _join((Q + latent, D), {"q_a_proj.weight": Q, "kv_a_proj_with_mqa.weight": latent}),
            "q_norm": _whole((Q,), "q_a_layernorm.weight"),
            "q_b": _whole((H, columns, Q), "q_b_proj.weight", (H * columns, Q)),
        }
    rows |= {
        "kv_norm": _whole((R,), "kv_a_layernorm.weight"),
        # Rows of the hub's tensor go head by head, the K key rows before the V value rows.
        "k_b": _part((H, K, R), "kv_b_proj.weight", (H * (K + V), R), (H, K + V, R), (0, 0, 0)),
        "v_b": _part((H, V, R), "kv_b_proj.weight", (H * (K + V), R), (H, K + V, R), (0, K, 0)),
        "o": _whole((D, H, V), "o_proj.weight", (D, H * V)),
    }
    return rows | ({"g": _whole((H, V, D), "g_proj.weight", (H * V, D))} if config.mla_use_output_gate else {})


def _dense(config: Config) -> dict[str, Parameter]:
    D, F = config.hidden_size, config.intermediate_size
    return {
        "gate_up": _stack((2, F, D), ["gate_proj.weight", "up_proj.weight"], (F, D)),
        "down": _whole((D, F), "down_proj.weight"),
    }


def _moe(config: Config) -> dict[str, Parameter]:
    D, E, F, S = config.hidden_size, config.num_experts, config.moe_intermediate_size, config.shared_intermediate_size
    Z = config.expert_hidden_size
    rows = {
        "router": _whole((E, D), "gate.weight"),
        "router_bias": _whole((E,), "gate.e_score_correction_bias")._replace(kept=True),
    }
    if config.routed_expert_hidden_size is not None:
        rows |= {"latent_down": _whole((Z, D), "routed_expert_down_proj.weight"),
                 "latent_up": _whole((D, Z), "routed_expert_up_proj.weight")}  # fmt: skip
        if config.latent_moe_use_norm:
            rows["latent_norm"] = _whole((Z,), "routed_expert_norm.weight")
    if config.packed_experts:
        for name, inputs in (("packed", 2), ("scale", MXFP4_GROUP)):  # inputs that one byte covers
            rows[f"experts_gate_up_{name}"] = _experts((E, 2, F, Z // inputs), ("w1", "w3"), f"weight_{name}", True)
            rows[f"experts_down_{name}"] = _experts((E, 1, Z, F // inputs), ("w2",), f"weight_{name}", True)
    else:
        fused = _whole((E, 2, F, Z), "experts.gate_up_proj", (E, 2 * F, Z)).pieces
        rows["experts_gate_up"] = _experts((E, 2, F, Z), ("w1", "w3"), "weight")._replace(fused=fused)
        fused = _whole((E, Z, F), "experts.down_proj").pieces
        rows["experts_down"] = _experts((E, 1, Z, F), ("w2",), "weight")._replace(fused=fused)
    if S:
        rows["shared_gate_up"] = _stack(
            (2, S, D), ["shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"], (S, D)
        )
        rows["shared_down"] = _whole((D, S), "shared_experts.down_proj.weight")
    return rows


def _part(shape: Shape, name: str, hub_shape: Shape, view: Shape, offset: Shape) -> Parameter:
    """A parameter that is a box of one tensor."""
    return Parameter(shape, (Piece(name, hub_shape, view, offset, shape, (0,) * len(shape)),))


def _whole(shape: Shape, name: str, hub_shape: Shape | None = None) -> Parameter:
    """A parameter that is one tensor."""
    return _part(shape, name, hub_shape or shape, shape, (0,) * len(shape))


def _join(shape: Shape, rows: dict[str, int]) -> Parameter:
    """Tensors below each other, each with its number of rows."""

    def pieces() -> Iterator[Piece]:
        first, none = 0, (0,) * len(shape)
        for name, count in rows.items():
            box = (count, *shape[1:])
            yield Piece(name, box, box, none, box, (first, *none[1:]))
            first += count

    return Parameter(shape, tuple(pieces()))


def _stack(shape: Shape, names: Sequence[str], hub_shape: Shape, axis: int = 0) -> Parameter:
    """Tensors of one shape, stacked along a new axis."""
    box, none = _with(shape, axis, 1), (0,) * len(shape)
    return Parameter(
        shape, tuple(Piece(name, hub_shape, box, none, box, _with(none, axis, i)) for i, name in enumerate(names))
    )


def _with(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def _experts(shape: Shape, names: Sequence[str], suffix: str, packed: bool = False) -> Parameter:
    """[experts, matrices, out, in] of one tensor an expert and matrix; without the second axis if there is one only."""
    hub_shape, single = shape[2:], len(names) == 1
    box, none = (1, *hub_shape) if single else (1, 1, *hub_shape), (0,) * (3 if single else 4)
    pieces = tuple(
        Piece(f"experts.{e}.{name}.{suffix}", hub_shape, box, none, box, (e, 0, 0) if single else (e, j, 0, 0))
        for e in range(shape[0])
        for j, name in enumerate(names)
    )
    return Parameter((shape[0], *hub_shape) if single else shape, pieces, packed=packed)
