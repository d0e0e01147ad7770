"""Float64 oracle for the text decoders of Kimi Linear ("A") and Kimi K3 ("B").

The plainest correct form: one sequence, no cache, the delta rule one token at a time, MLA with expanded keys and
values, everything in float64; written to be read and compared with, not to be fast.
Names after "spec:" in the docstrings are sections of the architecture specification.

Notation: T tokens, d hidden width, V vocabulary, H heads, D KDA head width, P = H*D, E experts, k experts per token.
Weights keep their checkpoint layout [out, in], so a projection is `x @ W.T`.  No projection has a bias.
`config` is the text config under its hub field names and `params` maps hub tensor names (without the
`language_model.` prefix) to float64 arrays.  Two knobs may be added to `config`:
    mla_latent_norm_eps       eps of q_a_layernorm and kv_a_layernorm                  (default 1e-6)
    router_weight_uses_bias   weigh the experts with biased instead of plain scores     (default False)
"""

import json
import re
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16, so that safetensors can hand out BF16 arrays)
import numpy as np
from safetensors import safe_open

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_TEXT = ("vision_tower.", "mm_projector.")


def mxfp4_dequantize(packed, scale):
    """MXFP4 to float64 (spec: MXFP4).

    packed [out, in/2] uint8, scale [out, in/32] uint8 -> [out, in].  Byte j of a row holds input 2j in its low and
    2j+1 in its high nibble; a nibble is a sign bit and an index into E2M1; one power-of-two scale covers 32 inputs:
        W[o, i] = (-1)^(n >> 3) * E2M1[n & 7] * 2^(scale[o, i // 32] - 127)
    """
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    values = np.where(nibbles & 8, -1.0, 1.0) * E2M1[nibbles & 7]
    return np.ldexp(values, np.repeat(scale.astype(np.int32) - 127, 32, axis=1))


def load(path):
    """Read a checkpoint folder (or its index, or a single safetensors file beside config.json) -> (config, params).

    Unwraps `text_config`, strips `language_model.`, leaves out the vision tensors, dequantises every pair
    `<name>.weight_packed` / `<name>.weight_scale` into `<name>.weight`, and accepts the spelling
    `block_sparse_moe.{gate,up,down}_proj` that one exporter writes for the dense layers (spec: native names).
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    index = folder / "model.safetensors.index.json"
    files, raw = [path if path.suffix == ".safetensors" else folder / "model.safetensors"], {}
    if path.suffix != ".safetensors" and index.exists():
        files = [folder / f for f in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for file in files:
        with safe_open(str(file), framework="np") as tensors:
            for name in (n for n in tensors.keys() if not n.startswith(NOT_TEXT)):
                short = name.removeprefix("language_model.")
                short = re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", short)
                raw[short] = tensors.get_tensor(name)

    params = {}
    for name, value in raw.items():
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            params[base] = mxfp4_dequantize(value, raw[base + "_scale"])
        elif not name.endswith(".weight_scale"):
            params[name] = value.astype(np.float64)
    return config, params


def sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis (spec: RMSNorm)."""
    return weight * x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)


def l2_norm(x):
    """x / sqrt(sum(x^2) + 1e-6) over the last axis: eps is added to the sum, not to a mean (spec: KDA, step 4)."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def situ(gate, up, beta, linear_beta):
    """[beta tanh(gate/beta) sigmoid(gate)] * [linear_beta tanh(up/linear_beta)]  (spec: SiTU).

    The sigmoid sees the uncapped gate.  beta null or 0 counts as 1; linear_beta null leaves `up` as it is.
    """
    beta, up = beta or 1.0, up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * up


def mlp(config, params, prefix, x, names=("gate_proj", "up_proj", "down_proj")):
    """down( act(gate x, up x) ): [T, in] -> [T, out]; SwiGLU in A, SiTU in B.  Routed experts: names w1, w3, w2."""
    gate, up, down = (params[f"{prefix}.{n}.weight"] for n in names)
    gate, up = x @ gate.T, x @ up.T
    assert config["hidden_act"] in ("silu", "situ")
    if config["hidden_act"] == "silu":
        return (gate * sigmoid(gate) * up) @ down.T
    return situ(gate, up, config.get("activation_situ_beta"), config.get("activation_situ_linear_beta")) @ down.T


def short_conv(x, weight):
    """Depthwise causal convolution followed by SiLU (spec: KDA, step 2).

    x [T, C], weight [C, 1, W] -> [T, C];  y[t, c] = sum_i weight[c, 0, i] * x[t - W + 1 + i, c], zeros before the
    start; the last tap multiplies the current token.
    """
    width = weight.shape[-1]
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    y = sum(weight[:, 0, i] * padded[i : i + len(x)] for i in range(width))
    return y * sigmoid(y)


def kda_gate(f, a_log, dt_bias, lower_bound=None):
    """Log decay g <= 0 per head and key channel (spec: KDA, step 6).  f, dt_bias [..., H, D]; a_log [H] -> like f.

    A: g = -exp(a_log) softplus(f + dt_bias)           B: g = lower_bound * sigmoid(exp(a_log) (f + dt_bias))
    """
    z, a = f + dt_bias, np.exp(a_log)[:, None]
    return -a * np.logaddexp(0.0, z) if lower_bound is None else lower_bound * sigmoid(a * z)


def kda_recurrence(q, k, v, g, beta, state=None):
    """The delta rule with channel-wise decay, one token after the other (spec: KDA, step 8).

    q, k, g [T, H, K] (k normalised, q normalised and scaled), v [T, H, V], beta [T, H], state [H, K, V] (zeros if
    None) -> outputs [T, H, V], final state [H, K, V].  Per token and head:
        S <- Diag(e^g) S ;   S <- S + k (beta (v - S^T k))^T ;   o = S^T q          (read after the write)
    """
    state = np.zeros((*k.shape[1:], v.shape[-1])) if state is None else state.copy()
    out = np.empty(v.shape)
    for t in range(len(k)):
        state *= np.exp(g[t])[:, :, None]
        update = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state += k[t][:, :, None] * update[:, None, :]
        out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out, state


def kda(config, params, prefix, x):
    """Kimi Delta Attention block, [T, d] (pre-normed) -> [T, d] (spec: KDA; KDA in K3).

    A_log may be stored with trailing padding: only its first H entries count.  The output gate is low rank in A
    (g_a, g_b) and full rank in B (g_proj); it acts through a sigmoid after a per-head RMSNorm with a shared weight.
    """
    linear = config["linear_attn_config"]
    heads, width = linear["num_heads"], linear["head_dim"]

    def get(name):
        return params[f"{prefix}.{name}"]

    def lin(name, y=x):
        return y @ get(f"{name}.weight").T

    def split(y):
        return y.reshape(len(x), heads, width)

    q, k, v = (split(short_conv(lin(f"{n}_proj"), get(f"{n}_conv1d.weight"))) for n in "qkv")
    q, k = l2_norm(q) * width**-0.5, l2_norm(k)
    g = kda_gate(
        split(lin("f_b_proj", lin("f_a_proj"))),
        get("A_log").reshape(-1)[:heads],
        get("dt_bias").reshape(heads, width),
        linear.get("gate_lower_bound"),
    )
    out, _ = kda_recurrence(q, k, v, g, sigmoid(lin("b_proj")))
    gate = lin("g_proj") if linear.get("use_full_rank_gate") else lin("g_b_proj", lin("g_a_proj"))
    out = rms_norm(out, get("o_norm.weight"), config["rms_norm_eps"]) * sigmoid(split(gate))
    return lin("o_proj", out.reshape(len(x), -1))


def mla(config, params, prefix, x):
    """Multi-head latent attention without positions, expanded form, [T, d] -> [T, d] (spec: NoPE MLA; MLA in K3).

    Per head the query has n "nope" and r "rope" columns (never rotated); keys are n columns expanded from the normed
    latent plus r columns shared by all heads; causal scores are scaled by (n + r)^-1/2.  B multiplies the heads'
    output with sigmoid(g_proj x) before o_proj.
    """
    tokens, heads, latent = len(x), config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    eps = config.get("mla_latent_norm_eps", 1e-6)

    def lin(name, y=x):
        return y @ params[f"{prefix}.{name}.weight"].T

    def norm(name, y):
        return rms_norm(y, params[f"{prefix}.{name}.weight"], eps)

    q = lin("q_b_proj", norm("q_a_layernorm", lin("q_a_proj"))) if config.get("q_lora_rank") else lin("q_proj")
    q = q.reshape(tokens, heads, nope + rope)
    compressed = lin("kv_a_proj_with_mqa")  # [T, latent + rope]
    kv = lin("kv_b_proj", norm("kv_a_layernorm", compressed[:, :latent])).reshape(tokens, heads, nope + value)
    shared = np.broadcast_to(compressed[:, None, latent:], (tokens, heads, rope))
    k, v = np.concatenate([kv[..., :nope], shared], -1), kv[..., nope:]

    scores = np.einsum("thc,shc->hts", q, k) * (nope + rope) ** -0.5
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    out = np.einsum("hts,shv->thv", softmax(scores), v).reshape(tokens, heads * value)
    if config.get("mla_use_output_gate"):
        out = out * sigmoid(lin("g_proj"))
    return lin("o_proj", out)


def router(config, weight, bias, x):
    """Sigmoid top-k router (spec: Router).  weight [E, d], bias [E], x [T, d] -> idx [T, k], w [T, k], c [T, E].

    s = sigmoid(x W^T) ;   c = s + bias ;   idx = top-k of c ;   w = s[idx]  (c[idx] with router_weight_uses_bias)
    w <- w / (sum w + 1e-20) if moe_renormalize ;   w <- w * routed_scaling_factor
    """
    assert config.get("moe_router_activation_func", "sigmoid") == "sigmoid"
    assert (config.get("num_expert_group") or 1) == 1, "grouped routing is not used by these models"
    scores = sigmoid(x @ weight.T)
    selection = scores + bias
    idx = np.argsort(-selection, axis=-1, kind="stable")[:, : config["num_experts_per_token"]]
    w = np.take_along_axis(selection if config.get("router_weight_uses_bias") else scores, idx, -1)
    w = w / (w.sum(-1, keepdims=True) + 1e-20) if config["moe_renormalize"] else w
    return idx, w * config["routed_scaling_factor"], selection


def moe(config, params, prefix, x, trace=None):
    """Routed plus shared experts, [T, d] -> [T, d] (spec: model A Forward; Latent MoE).

    A: y = sum_k w_k expert_k(x).   B: z = down(x); y = up( RMS( sum_k w_k expert_k(z) ) ), norm after the weighted sum.
    The router and the shared experts (one MLP of width shared * moe_inter, not gated) always see x.
    """
    gate, bias = params[f"{prefix}.gate.weight"], params[f"{prefix}.gate.e_score_correction_bias"]
    idx, w, selection = router(config, gate, bias, x)
    if trace is not None:
        trace.setdefault("selection", []).append(selection)
    latent = config.get("routed_expert_hidden_size")
    z = x @ params[f"{prefix}.routed_expert_down_proj.weight"].T if latent else x
    y = np.zeros_like(z)
    for e in np.unique(idx):
        rows, slot = np.nonzero(idx == e)
        y[rows] += w[rows, slot][:, None] * mlp(config, params, f"{prefix}.experts.{e}", z[rows], ("w1", "w3", "w2"))
    if latent:
        if config.get("latent_moe_use_norm"):
            y = rms_norm(y, params[f"{prefix}.routed_expert_norm.weight"], config["rms_norm_eps"])
        y = y @ params[f"{prefix}.routed_expert_up_proj.weight"].T
    if config.get("num_shared_experts"):
        y = y + mlp(config, params, f"{prefix}.shared_experts", x)
    return y


def attn_res(params, name, blocks, h, eps):
    """Attention Residuals: mix stored blocks and the running sum, per token (spec: Attention Residuals).

    blocks: n arrays [T, d]; h [T, d]; parameters `<name>_norm.weight` [d] and `<name>_proj.weight` [1, d] -> [T, d].
        V = (blocks..., h) ;   e_i = proj . RMS(V_i; norm) ;   out = sum_i softmax(e)_i V_i     (values not normalised)
    """
    values = np.stack([*blocks, h], axis=1)  # [T, n + 1, d]
    scores = rms_norm(values, params[f"{name}_norm.weight"], eps) @ params[f"{name}_proj.weight"][0]
    return np.einsum("tn,tnd->td", softmax(scores), values)


def forward(config, params, ids, trace=None):
    """Token ids [T] of one sequence -> logits [T, V] (spec: model A Forward; model B Forward, top level).

    With a dict in `trace`, also records "hidden" (h after every layer, [T, d]; with Attention Residuals the running
    sum, which restarts at block boundaries, not the mix) and "selection" (router scores plus bias per MoE layer).
    """
    eps, block_size = config["rms_norm_eps"], config.get("attn_res_block_size")
    kda_layers, full_layers = (config["linear_attn_config"][n] for n in ("kda_layers", "full_attn_layers"))  # 1-based
    h, blocks = params["model.embed_tokens.weight"][np.asarray(ids)], []

    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        assert (layer + 1 in kda_layers) != (layer + 1 in full_layers)
        attend = kda if layer + 1 in kda_layers else mla
        # The mix feeds the sub-layer only; sums run over the un-mixed h.  At a block boundary the mix comes before
        # the finished sum is stored, and the sum restarts from the attention output.
        x = attn_res(params, f"{name}.self_attention_res", blocks, h, eps) if blocks else h
        restart = block_size is not None and layer % block_size == 0
        if restart:
            blocks = [*blocks, h]
        a = attend(config, params, f"{name}.self_attn", rms_norm(x, params[f"{name}.input_layernorm.weight"], eps))
        h = a if restart else h + a
        x = attn_res(params, f"{name}.mlp_res", blocks, h, eps) if blocks else h
        x = rms_norm(x, params[f"{name}.post_attention_layernorm.weight"], eps)
        dense = layer < config["first_k_dense_replace"]
        h = h + (
            mlp(config, params, f"{name}.mlp", x)
            if dense
            else moe(config, params, f"{name}.block_sparse_moe", x, trace)
        )
        if trace is not None:
            trace.setdefault("hidden", []).append(h)

    if blocks:
        h = attn_res(params, "model.output_attn_res", blocks, h, eps)
    return rms_norm(h, params["model.norm.weight"], eps) @ params["lm_head.weight"].T


def greedy(config, params, prompt_ids, n):
    """The n most likely next tokens, one by one, recomputing the whole sequence each time -> int32 [n]."""
    ids = list(prompt_ids)
    for _ in range(n):
        ids.append(int(forward(config, params, ids)[-1].argmax()))
    return np.array(ids[len(prompt_ids) :], np.int32)
