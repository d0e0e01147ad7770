"""Every logical axis name, with one line of meaning each.

A name says what an axis *is*; a `Layout` says where it lives. The same word always means the same placement: where one
quantity is placed in two ways (MLA heads before and after the combine) there are two words.
"""

BATCH = "batch"  # sequences in flight
LENGTH = "length"  # tokens fed in one call, of a prompt chunk or of a decode step
EMBED = "embed"  # the residual stream's width
VOCAB = "vocab"  # rows of the embedding and of lm_head, and the logits' axis

QKV_A = (
    "qkv_a"  # rows of the merged MLA down-projection: q_lora, then kv_lora + rope (without q-LoRA: the latter alone)
)
Q_LORA = "q_lora"  # the query latent
KV_LORA = "kv_lora"  # the key/value latent
LATENT = "latent"  # one row of the latent cache: kv_lora + rope numbers
HEADS = "heads"  # MLA heads while they attend: queries, keys and values, before the combine
HEADS_MERGED = "heads_merged"  # MLA heads after the combine: output gate and o_proj
STRIPES = "stripes"  # the ranks over which positions are dealt out in blocks
SLOTS = "slots"  # the positions that one stripe holds

KDA_HEADS = "kda_heads"  # KDA heads: projections, convolution, recurrent state
HIDDEN = "hidden"  # inner width of the dense MLP and of the shared experts
EXPERTS = "experts"  # whole routed experts
LATENT_MOE = "latent_moe"  # the narrower width in which K3's routed experts work

ALL = (
    BATCH, LENGTH, EMBED, VOCAB, QKV_A, Q_LORA, KV_LORA, LATENT, HEADS, HEADS_MERGED, STRIPES, SLOTS, KDA_HEADS, HIDDEN,
    EXPERTS, LATENT_MOE,
)  # fmt: skip
