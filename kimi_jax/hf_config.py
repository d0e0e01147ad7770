"""The hub's config keys: which say a field of Config, which must have one value, which are ignored and why.

Reads a config.json into Config's fields and writes it back. Must not know tensors, devices or what the math does.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kimi_jax import strict_json

# Fields that are whole numbers, with the least they may be.
SIZES = dict.fromkeys(
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim kda_num_heads kda_head_dim conv_width intermediate_size num_experts "
    "num_experts_per_token moe_intermediate_size routed_expert_hidden_size attn_res_block_size max_length".split(),
    1,
) | {"first_k_dense_replace": 0, "num_shared_experts": 0}
OPTIONAL_SIZES = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size")

# Field of Config -> the hub keys that say it: the one that is written, then what others call the same thing.
SPELLINGS = {name: (name,) for name in SIZES if not name.startswith(("kda_", "conv_"))} | {
    "max_length": ("model_max_length", "max_position_embeddings"),
    "num_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_token", "num_experts_per_tok"),
    "num_shared_experts": ("num_shared_experts", "n_shared_experts"),
    "moe_renormalize": ("moe_renormalize", "norm_topk_prob"),
    "situ_beta": ("activation_situ_beta",),
    "situ_linear_beta": ("activation_situ_linear_beta",),
    "dtype": ("dtype", "torch_dtype"),
    "eos_token_ids": ("eos_token_id",),
} | {
    name: (name,)
    for name in "mla_use_output_gate mla_latent_norm_eps hidden_act routed_scaling_factor router_weight_uses_bias "
    "latent_moe_use_norm rms_norm_eps bos_token_id pad_token_id".split()
}  # fmt: skip
# The same inside `linear_attn_config`; transformers repeats three of them outside.
LINEAR_SPELLINGS = {
    "kda_num_heads": ("num_heads", "linear_num_heads"),
    "kda_head_dim": ("head_dim", "linear_head_dim"),
    "conv_width": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    "gate_lower_bound": ("gate_lower_bound",),
    "use_full_rank_gate": ("use_full_rank_gate",),
}
LAYER_LISTS = ("kda_layers", "full_attn_layers")  # from 1
NATIVE_LINEAR = tuple(keys[1] for keys in LINEAR_SPELLINGS.values() if len(keys) > 1)

# What a field is when the config does not say it, or says null; a field in neither table must be there.
DEFAULTS: dict[str, Any] = dict(
    q_lora_rank=None, mla_use_output_gate=False, mla_latent_norm_eps=1e-6, gate_lower_bound=None,
    use_full_rank_gate=False, situ_beta=1.0, situ_linear_beta=None, num_shared_experts=0,
    router_weight_uses_bias=False, routed_expert_hidden_size=None, latent_moe_use_norm=False,
    attn_res_block_size=None, bos_token_id=None, eos_token_ids=(), pad_token_id=None,
    dtype="float32",  # torch's default; widening loses nothing
)  # fmt: skip
FLAGS = ("mla_use_output_gate", "use_full_rank_gate", "moe_renormalize", "router_weight_uses_bias",
         "latent_moe_use_norm")  # fmt: skip
NUMBERS = ("mla_latent_norm_eps", "gate_lower_bound", "situ_beta", "situ_linear_beta", "routed_scaling_factor",
           "rms_norm_eps")  # fmt: skip

# Key -> the values that mean what is implemented, and what any other would ask for. An absent key is fine.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "mla_use_nope": ((True,), "a rotary MLA is not implemented"),
    "tie_word_embeddings": ((False,), "tied embeddings are not implemented"),
    "attention_bias": ((False, None), "projections with a bias are not implemented"),
    **dict.fromkeys(("num_expert_group", "n_group", "topk_group"), ((1, None), "expert groups are not implemented")),
    "topk_method": (("noaux_tc", None), "routing without the selection bias is not implemented"),
    "moe_router_activation_func": (("sigmoid",), "a router other than sigmoid is not implemented"),
    "moe_layer_freq": ((1,), "only every layer from first_k_dense_replace on being MoE is implemented"),
    "num_nextn_predict_layers": ((0, None), "MTP layers are not implemented"),
}


def _by_key(reasons: dict[str, str]) -> dict[str, str]:
    """reason -> keys, turned into key -> reason."""
    return {key: reason for reason, keys in reasons.items() for key in keys.split()}


# Known keys that change nothing, with the reason.
IGNORED = _by_key({
    "names classes and code of other libraries; kinds are told by their keys": "architectures model_type auto_map",
    "says who wrote the file": "transformers_version",
    "bookkeeping of transformers": "_name_or_path _attn_implementation_autoset id2label label2id problem_type "
    "chunk_size_feed_forward is_encoder_decoder add_cross_attention",
    "asks for extra outputs": "output_attentions output_hidden_states output_router_logits return_dict",
    "how transformers generates, not what the model is": "use_cache",
    "training only": "initializer_range attention_dropout router_aux_loss_coef",
    "how the model was trained; results do not depend on it": "pretraining_tp",
    "no position is ever rotated": "rope_theta rope_scaling rope_parameters",
    "unused: hidden_size / num_attention_heads on the hub, the rope part after transformers": "head_dim",
    "transformers derives it from the nope and rope parts": "qk_head_dim",
    "of one group, which changes nothing": "use_grouped_topk",
})  # fmt: skip
# Outside `text_config` in K3's file. The text's own value goes first.
TOP_FALLBACK = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
TOP_IGNORED = _by_key({
    "only the text decoder is implemented": "vision_config",
    "marks images in a prompt": "media_placeholder_token_id image_placeholder",
    "training only": "ignore_index",
})  # fmt: skip
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None, "format": "mxfp4-pack-quantized",
        "weights": {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
            "scale_dtype": "torch.uint8", "zp_dtype": None, "actorder": None, "block_structure": None,
        }}},
}  # fmt: skip
QUANTIZATION_NEEDS = ("quant_method", "config_groups", "group_0", "weights", "num_bits", "type", "group_size")
QUANTIZATION_IGNORED = _by_key({
    "not the whole truth in K3's own file: packed is what is stored packed, exactly the routed experts": "ignore",
    "says how the file was made": "version global_compression_ratio observer observer_kwargs",
})  # fmt: skip


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Config that a hub config says; see `Config.from_hf`."""
    if isinstance(source, Mapping):
        hub, where = source, "config"
    else:
        file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        hub, where = strict_json.read_object(file), str(file)
    if "text_config" in hub:
        hub = _unwrap(hub, where)
    linear = _linear_keys(hub, where)
    known = {key for keys in SPELLINGS.values() for key in keys} | FIXED.keys() | IGNORED.keys()
    known |= {"linear_attn_config", "layer_types", "mlp_layer_types", "num_key_value_heads", "quantization_config"}
    _refuse_unknown(hub.keys() - known - set(NATIVE_LINEAR), where)
    for key, (accepted, reason) in FIXED.items():
        if key in hub and not _is_any(hub[key], accepted):
            raise ValueError(f"{where}: {key}={hub[key]!r}: {reason}")

    fields = {name: _say(hub, name, keys, where) for name, keys in SPELLINGS.items() if name != "first_k_dense_replace"}
    fields |= {name: _say(linear, name, keys, where) for name, keys in LINEAR_SPELLINGS.items()}
    fields["situ_beta"] = fields["situ_beta"] or 1.0
    fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
    eos = fields["eos_token_ids"]
    fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    fields["mla_layers"] = _mla_layers(hub, linear, fields["num_hidden_layers"], where)
    fields["first_k_dense_replace"] = _dense_layers(hub, fields["num_hidden_layers"], where)
    heads = hub.get("num_key_value_heads")
    if heads is not None and heads != fields["num_attention_heads"]:
        raise ValueError(
            f"{where}: num_key_value_heads={heads} with num_attention_heads={fields['num_attention_heads']}: MLA has "
            "one latent for all heads, so grouped heads are not implemented"
        )
    quantization = hub.get("quantization_config")
    if quantization is not None:
        _check_quantization(quantization, QUANTIZATION, f"{where}: quantization_config")
    fields["packed_experts"] = quantization is not None
    return fields


def write(config: Any) -> dict[str, Any]:
    """The hub config of a Config: K3's two levels if it needs K3's keys, else Kimi Linear's."""
    text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    for name, keys in SPELLINGS.items():
        value = getattr(config, name)
        if name not in DEFAULTS or value != DEFAULTS[name] or name in ("q_lora_rank", "dtype"):
            text[keys[0]] = value
    eos = config.eos_token_ids
    text["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    layers = range(1, config.num_hidden_layers + 1)
    linear = {
        "full_attn_layers": [layer for layer in layers if config.is_mla(layer - 1)],
        "kda_layers": [layer for layer in layers if not config.is_mla(layer - 1)],
    }
    for name, (key, *_) in LINEAR_SPELLINGS.items():
        if name not in DEFAULTS or getattr(config, name) != DEFAULTS[name]:
            linear[key] = getattr(config, name)
    text |= {
        "linear_attn_config": linear, "num_key_value_heads": config.num_attention_heads, "mla_use_nope": True,
        "tie_word_embeddings": False, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
        "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    if config.packed_experts:
        text["quantization_config"] = {key: value for key, value in QUANTIZATION.items() if value != {}}
    if not config.is_k3:
        return text
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "tie_word_embeddings": False}
    return top | {key: text[key] for key in TOP_FALLBACK[:-1] if key in text} | {"text_config": text}


def with_dtype(hub: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A hub config that says `dtype`, at both levels if it has two, and else what it said."""
    said = {key: value for key, value in hub.items() if key != "torch_dtype"} | {"dtype": dtype}
    return said | {"text_config": with_dtype(hub["text_config"], dtype)} if "text_config" in hub else said


def _unwrap(top: Mapping[str, Any], where: str) -> dict[str, Any]:
    """K3's text config, with what only its top level says."""
    text = top["text_config"]
    if not isinstance(text, Mapping):
        raise ValueError(f"{where}: text_config={text!r}: a JSON object was wanted")
    known = {"text_config", *TOP_FALLBACK, *TOP_IGNORED, *IGNORED, *FIXED}
    _refuse_unknown(top.keys() - known, f"{where}, beside text_config")
    inherited = {key: top[key] for key in top if key in TOP_FALLBACK or key in FIXED}
    said = {key: value for key, value in text.items() if value is not None or key not in inherited}
    for key in FIXED.keys() & inherited.keys() & said.keys():
        if said[key] != inherited[key]:
            raise ValueError(f"{where}: {key}={inherited[key]!r} beside text_config, {said[key]!r} in it")
    if {"dtype", "torch_dtype"} & said.keys():
        inherited = {key: value for key, value in inherited.items() if key not in ("dtype", "torch_dtype")}
    return inherited | said


def _linear_keys(hub: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`linear_attn_config` with the keys that transformers writes outside of it."""
    linear = hub.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ValueError(f"{where}: linear_attn_config={linear!r}: a JSON object was wanted")
    _refuse_unknown(
        linear.keys() - {*LAYER_LISTS, *(k[0] for k in LINEAR_SPELLINGS.values())}, f"{where}: linear_attn_config"
    )
    return dict(linear) | {key: hub[key] for key in NATIVE_LINEAR if key in hub}


def _refuse_unknown(keys: Iterable[str], where: str) -> None:
    if names := ", ".join(sorted(keys)):
        raise ValueError(
            f"{where}: unknown key {names}. A key that changes nothing belongs into hf_config.IGNORED with the reason; "
            "any other needs an implementation"
        )


def _is_any(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Membership that tells True from 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)


def _say(hub: Mapping[str, Any], name: str, keys: tuple[str, ...], where: str) -> Any:
    """The value of one field under any of its spellings, of the right type."""
    said = {key: hub[key] for key in keys if hub.get(key) is not None}
    if not said:
        if name in DEFAULTS:
            return DEFAULTS[name]
        raise ValueError(f"{where}: the key {keys[0]} is missing")
    (key, value), *others = said.items()
    for other, second in others:
        if second != value:
            raise ValueError(f"{where}: {key}={value!r} and {other}={second!r} say different things")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    if name in FLAGS:
        fits, wanted = isinstance(value, bool), "true or false"
    elif name in NUMBERS:
        fits, wanted = number, "a number"
        value = float(value) if number else value
    elif name in ("dtype", "hidden_act"):
        fits, wanted = isinstance(value, str), "a string"
    elif name == "eos_token_ids" and isinstance(value, list):
        fits, wanted = all(isinstance(i, int) and not isinstance(i, bool) for i in value), "token ids"
    else:
        fits, wanted = whole, "a whole number"
    if not fits:
        raise ValueError(f"{where}: {key}={value!r}: {wanted} was wanted")
    return value


def _mla_layers(hub: Mapping[str, Any], linear: Mapping[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Which layers are MLA, from 0: by the two lists, by `layer_types`, or by both if they agree."""
    kinds = hub.get("layer_types")
    if kinds is not None:
        names = {"full_attention", "linear_attention"}
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in names for kind in kinds):
            raise ValueError(f"{where}: layer_types must name {layers} layers, each one of {', '.join(sorted(names))}")
    if all(linear.get(key) is None for key in LAYER_LISTS):
        if kinds is None:
            raise ValueError(f"{where}: linear_attn_config.{' and .'.join(LAYER_LISTS)} are missing")
        return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    lists: list[set[int]] = []
    for key in LAYER_LISTS:
        numbers = linear.get(key)
        if not isinstance(numbers, list) or not all(type(n) is int and 1 <= n <= layers for n in numbers):
            raise ValueError(f"{where}: linear_attn_config.{key} must list layers in 1..{layers}; it is {numbers!r}")
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"{where}: linear_attn_config.{key} lists a layer twice: {numbers}")
        lists.append(set(numbers))
    kda, full = lists
    for layer in range(1, layers + 1):
        if (layer in kda) == (layer in full):
            raise ValueError(f"{where}: layer {layer} is in {'both' if layer in kda else 'neither'} of {LAYER_LISTS}")
        if kinds is not None and (kinds[layer - 1] == "full_attention") != (layer in full):
            raise ValueError(f"{where}: layer_types[{layer - 1}]={kinds[layer - 1]!r} contradicts linear_attn_config")
    return tuple(sorted(layer - 1 for layer in full))


def _dense_layers(hub: Mapping[str, Any], layers: int, where: str) -> int:
    """How many layers come before the first MoE one: by the number, by `mlp_layer_types`, or by both if they agree."""
    kinds, name = hub.get("mlp_layer_types"), "first_k_dense_replace"
    if kinds is None:
        return _say(hub, name, (name,), where)
    count = kinds.count("dense") if isinstance(kinds, list) else -1
    if not isinstance(kinds, list) or kinds != ["dense"] * count + ["sparse"] * (layers - count):
        raise ValueError(f"{where}: mlp_layer_types must be {layers} layers, all dense ones before the sparse ones")
    if hub.get(name) is None:
        return count
    said = _say(hub, name, (name,), where)
    if min(said, layers) != count:
        raise ValueError(f"{where}: {name}={said} contradicts {count} dense layers in mlp_layer_types")
    return said


def _check_quantization(value: Any, wanted: Any, where: str) -> None:
    """Raise unless `value` says no more than `wanted`, MXFP4 as K3 has it."""
    if not isinstance(wanted, dict) or not wanted:
        if value != wanted and (value is not None or wanted != {}):
            raise ValueError(f"{where}={value!r}: only K3's packed MXFP4 experts ({wanted!r} here) are implemented")
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}={value!r}: a JSON object was wanted")
    for key in wanted:
        if key in QUANTIZATION_NEEDS and key not in value:
            raise ValueError(f"{where}: the key {key} is missing; only K3's packed MXFP4 experts are implemented")
    _refuse_unknown(value.keys() - wanted.keys() - QUANTIZATION_IGNORED.keys(), where)
    for key in value.keys() & wanted.keys():
        _check_quantization(value[key], wanted[key], f"{where}.{key}")
