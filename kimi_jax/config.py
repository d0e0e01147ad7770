"""The architecture of one model, as a frozen value: sizes, which layer is of which kind, constants of the math.

Must not know how a model is spread over devices, how it is run, or how tensors are named; the hub's config keys are
in `hf_config`.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_jax import hf_config

ASSETS = Path(__file__).parent / "assets"
DTYPES = ("bfloat16", "float32", "float16")
ACTIVATIONS = ("silu", "situ")
MXFP4_GROUP = 32  # inputs that share one scale


@dataclass(frozen=True, kw_only=True)
class Config:
    """Kimi Linear or Kimi K3 (text), under the hub's field names where it has one.

    Layers count from 0. What only K3 has is None or False for Kimi Linear. Sizes are whole numbers of at least 1, and
    a value that the model cannot have is a ValueError that names the field.
    """

    vocab_size: int  # W
    hidden_size: int  # D
    num_hidden_layers: int
    mla_layers: tuple[int, ...]  # ascending, from 0; every other layer is KDA
    # MLA
    num_attention_heads: int  # H
    q_lora_rank: int | None  # None: queries come straight from the input
    kv_lora_rank: int  # R
    qk_nope_head_dim: int  # K
    qk_rope_head_dim: int  # P: shared by the heads, never rotated
    v_head_dim: int  # V
    mla_use_output_gate: bool = False
    mla_latent_norm_eps: float = 1e-6  # not rms_norm_eps: the published code leaves this norm at its class default
    # KDA
    kda_num_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float | None = None  # None: softplus gate; else g = bound * sigmoid(...), in (bound, 0)
    use_full_rank_gate: bool = False
    # feed-forward
    intermediate_size: int  # of the dense layers
    hidden_act: str = "silu"
    situ_beta: float = 1.0
    situ_linear_beta: float | None = None  # None: no cap on the linear half
    first_k_dense_replace: int  # layers 0 .. this - 1 are dense, the others are MoE
    num_experts: int  # E
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    moe_renormalize: bool
    routed_scaling_factor: float
    router_weight_uses_bias: bool = False  # True reproduces the published code of Kimi Linear, an aliasing accident
    routed_expert_hidden_size: int | None = None  # None: experts work on the hidden width itself
    latent_moe_use_norm: bool = False
    packed_experts: bool = False  # routed experts are MXFP4 pairs and scales
    # residual stream, norms
    attn_res_block_size: int | None = None  # None: plain residual sum
    rms_norm_eps: float
    # what the checkpoint says of itself
    dtype: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    max_length: int  # tokens that the model was made for; nothing in the math depends on it

    def __post_init__(self) -> None:
        for name, at_least in hf_config.SIZES.items():
            value = getattr(self, name)
            if name in hf_config.OPTIONAL_SIZES and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                raise ValueError(f"{name}={value!r}: a whole number of at least {at_least} was wanted")
        outside = [layer for layer in self.mla_layers if not 0 <= layer < self.num_hidden_layers]
        if outside or list(self.mla_layers) != sorted(set(self.mla_layers)):
            raise ValueError(
                f"mla_layers={self.mla_layers}: ascending and different layers in 0..{self.num_hidden_layers - 1} "
                f"were wanted (num_hidden_layers={self.num_hidden_layers})"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r}: one of {', '.join(ACTIVATIONS)} was wanted")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: one of {', '.join(DTYPES)} was wanted")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token} is more than num_experts={self.num_experts}"
            )
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(f"gate_lower_bound={self.gate_lower_bound}: a log decay, so below 0, was wanted")
        for name in ("rms_norm_eps", "mla_latent_norm_eps", "situ_beta", "situ_linear_beta"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: more than 0 was wanted")
        for name in ("expert_hidden_size", "moe_intermediate_size") if self.packed_experts else ():
            if getattr(self, name) % MXFP4_GROUP:
                raise ValueError(f"{name}={getattr(self, name)} of packed experts must divide by {MXFP4_GROUP}")

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """The layers that `mla_layers` leaves."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.mla_layers)

    def is_mla(self, layer: int) -> bool:
        """Attention of this layer: MLA, else KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Feed-forward of this layer: MoE, else dense."""
        return layer >= self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        """K + P: columns of one query head; scores are scaled by its inverse square root."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def shared_intermediate_size(self) -> int:
        """Hidden width of the shared experts, which are one MLP."""
        return self.moe_intermediate_size * self.num_shared_experts

    @property
    def is_k3(self) -> bool:
        """True if any part is used that Kimi Linear's own config cannot say: then the hub's form is K3's."""
        return (
            self.hidden_act == "situ"
            or self.mla_use_output_gate
            or self.use_full_rank_gate
            or self.packed_experts
            or any(
                value is not None
                for value in (self.gate_lower_bound, self.routed_expert_hidden_size, self.attn_res_block_size)
            )
        )

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> "Config":
        """Read a hub config: a checkpoint folder, a config.json, or its dict.

        K3's top level is unwrapped. Kinds are told by their keys, never by `model_type`: both models carry the same.
        Raises ValueError for a key nobody knows, a missing one, one that contradicts another, and for what is not
        implemented, each by name.
        """
        return cls(**hf_config.read(source))

    @classmethod
    def named(cls, name: str) -> "Config":
        """A published configuration that ships in the package: "kimi-linear-48b" or "kimi-k3"."""
        folder = ASSETS / "configs"
        known = sorted(path.stem for path in folder.glob("*.json"))
        if name not in known:
            raise ValueError(f"config {name!r} is not one of {', '.join(known)}")
        return cls.from_hf(folder / f"{name}.json")

    def to_hf(self) -> dict[str, Any]:
        """The hub config that says this, such that `Config.from_hf(config.to_hf()) == config`."""
        return hf_config.write(self)


@functools.cache
def _published(attribute: str) -> Config:
    return Config.named({"KIMI_LINEAR_48B": "kimi-linear-48b", "KIMI_K3": "kimi-k3"}[attribute])


def __getattr__(name: str) -> Config:
    """KIMI_LINEAR_48B and KIMI_K3, read when first asked for."""
    if name in ("KIMI_LINEAR_48B", "KIMI_K3"):
        return _published(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
