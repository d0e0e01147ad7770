"""The helix table: one row a logical axis, with its reason. `SINGLE` is the same table on a mesh of one device."""

from sharding_rules import axes
from sharding_rules.layout import Layout
from sharding_rules.mesh import CP, TP

EVERY = (TP, CP)  # the whole group, tp-major: rank t * cp + c
ALONE = ()  # replicated


def helix(
    tp: int = 1,
    cp: int = 1,
    *,
    shard_qkv_a: bool = False,
    tokens_per_block: int = 64,
    moe_tp: int = 1,
    pad_heads: bool = False,
    attention_dp: bool = False,
) -> Layout:
    """A mesh (tp, cp) for helix decode: MLA heads over tp, its cache over cp, all else over both, experts whole.

    shard_qkv_a: store the merged q_a|kv_a projection as column shards over all ranks and gather its output, which saves
        (ranks - 1) / ranks of that weight a device for one small all-gather per MLA layer.
    tokens_per_block: positions which a rank takes in turn; see `sharding_rules.stripes`.
    pad_heads: pad MLA heads that the ranks do not divide with zero heads.
    moe_tp, attention_dp: other splits that engines offer and this design excludes; anything but the default is refused.

    Source: Helix Parallelism (arXiv 2507.07120), section 2, extended to KDA's states and to expert parallelism.
    """
    for name, value in (("shard_qkv_a", shard_qkv_a), ("pad_heads", pad_heads)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}: True or False is wanted")
    if moe_tp != 1:
        raise ValueError(f"moe_tp={moe_tp}: experts are placed whole, over tp * cp = {tp * cp} ranks; use moe_tp=1")
    if attention_dp:
        raise ValueError(
            "attention_dp=True: helix splits each sequence's cache over cp, so requests cannot be split over the same "
            "ranks; use attention_dp=False, or several models on disjoint devices"
        )
    rules = {
        # Every rank computes every token: the residual stream is replicated, only weights and states are split.
        axes.BATCH: ALONE,
        axes.LENGTH: ALONE,
        axes.EMBED: ALONE,
        # Two of the largest matrices; one all-reduce (embedding) and one all-gather (logits) a step.
        axes.VOCAB: EVERY,
        # Each cp rank needs the latents of every token: recomputing them is cheaper than sending them, so replicated.
        axes.QKV_A: EVERY if shard_qkv_a else ALONE,
        axes.Q_LORA: ALONE,
        axes.KV_LORA: ALONE,
        axes.LATENT: ALONE,
        # One latent serves all heads, so tp cannot split the cache; positions are dealt to cp instead.
        axes.STRIPES: (CP,),
        axes.SLOTS: ALONE,
        # Ranks of one cp group attend with the same heads over different positions ...
        axes.HEADS: (TP,),
        # ... and the combine leaves each rank one chunk of them: chunk t * cp + c, hence cp last.
        axes.HEADS_MERGED: EVERY,
        # A KDA head's state has no sequence axis to split, and heads never talk to each other.
        axes.KDA_HEADS: EVERY,
        axes.HIDDEN: EVERY,
        axes.EXPERTS: EVERY,
        # Small beside the experts; sharding it (`replace`) trades memory for a gather a layer.
        axes.LATENT_MOE: ALONE,
    }
    return Layout(tp, cp, tuple(rules.items()), tokens_per_block, pad_heads)


SINGLE = helix(tp=1, cp=1)
