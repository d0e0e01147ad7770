"""What testing a port needs: simulated devices, and small seeded K3 checkpoints as the hub would have them."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from kimi_jax.checkpoints.appearing import refuse_taken
from kimi_jax.checkpoints.contents import Contents
from kimi_jax.checkpoints.hub_write import export_params
from kimi_jax.checkpoints.names import canonical, hub_tensors
from kimi_jax.config import Config
from kimi_jax.loading import export_safetensors, load, random_model

# All of K3's parts in nine layers: dense and MoE, KDA and MLA, attention residuals of three blocks; no two axes of one
# weight are of one size, and sixteen ranks divide what is split.
TINY_K3 = Config(
    vocab_size=272, hidden_size=56, num_hidden_layers=9, mla_layers=(3, 7, 8), num_attention_heads=16, q_lora_rank=48,
    kv_lora_rank=32, qk_nope_head_dim=20, qk_rope_head_dim=16, v_head_dim=24, mla_use_output_gate=True,
    kda_num_heads=16, kda_head_dim=12, conv_width=4, gate_lower_bound=-5.0, use_full_rank_gate=True,
    intermediate_size=112, hidden_act="situ", situ_beta=4.0, situ_linear_beta=25.0, first_k_dense_replace=1,
    num_experts=16, num_experts_per_token=4, num_shared_experts=2, moe_intermediate_size=32, moe_renormalize=True,
    routed_scaling_factor=1.0, routed_expert_hidden_size=64, latent_moe_use_norm=True, packed_experts=True,
    attn_res_block_size=3, rms_norm_eps=1e-5, dtype="bfloat16", bos_token_id=269, eos_token_ids=(270,),
    pad_token_id=271, max_length=4096,
)  # fmt: skip
A_LOG_TAIL = 8  # numbers that K3's A_log is stored longer than its heads

_COUNT = "jax_num_cpu_devices"


def simulate_devices(n: int) -> None:
    """Let this process see n host devices in place of its own; it keeps those it has if they are n or more.

    n: 1 or more. Call it before anything uses JAX, which counts its devices once. Simulated devices share the cores of
    the machine: they show what a layout does, not how fast it is.

    Raises ValueError for n < 1, and RuntimeError if JAX has already started without n host devices.
    """
    if n < 1:
        raise ValueError(f"n={n} devices: wanted 1 or more; pass tp*cp of the layout to try")
    if not _started():
        jax.config.update(_COUNT, max(n, getattr(jax.config, _COUNT)))
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "cpu" or jax.device_count() < n:
        raise RuntimeError(
            f"n={n} devices: JAX has already started, with {jax.device_count()} {jax.default_backend()} device(s); "
            "restart Python (in a notebook, the kernel) and call simulate_devices before anything else uses JAX"
        )


def simulated_devices(n: int = 8) -> Any:
    """A session-wide pytest fixture: the list of n host devices. For a conftest.py, before its tests use JAX:

    `devices = kimi_jax.testing.simulated_devices(8)`

    Raises what `simulate_devices` raises.
    """
    import pytest

    simulate_devices(n)

    @pytest.fixture(scope="session")
    def devices():
        return jax.devices()[:n]

    return devices


def write_tiny_k3(path: str | Path, *, seed: int = 0, shard_size: str | int = "1MB") -> tuple[Path, Path]:
    """Write a random K3 of 2.4 MB as the hub would have it, and its twin -> the two folders, `path` and `path`-bf16.

    The first has packed MXFP4 experts, an index over several shards, the names of the hub and A_log stored longer
    than the heads; the twin the same numbers with experts unpacked to bfloat16. Whatever reads K3 must make the same of
    both. The config is `TINY_K3`; `seed` draws the weights, the same in every process and on every layout.

    Raises ValueError if one of the folders exists and is not empty.
    """
    path = Path(path)
    twin = path.with_name(f"{path.name}-bf16")
    for folder in (path, twin):
        refuse_taken(folder)
    tail = np.zeros(A_LOG_TAIL, np.float32)
    padding = {
        canonical(name, TINY_K3): tail
        for name, uses in hub_tensors(TINY_K3).items()
        if any(parameter.endswith("A_log") for parameter, _ in uses)
    }
    params = random_model(TINY_K3, seed=seed).params
    export_params(path, Contents(TINY_K3, params, padding=padding), shard_size=shard_size, progress=False)
    export_safetensors(load(path, experts="bfloat16", progress=False), twin, progress=False)
    return path, twin


def _started() -> bool:
    """Whether JAX has counted its devices. It has no question for that, but refuses another count from then on."""
    count = getattr(jax.config, _COUNT)
    try:
        jax.config.update(_COUNT, count + 1)
    except RuntimeError:
        return True
    jax.config.update(_COUNT, count)
    return False
