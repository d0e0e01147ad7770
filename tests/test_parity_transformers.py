"""Live parity with transformers: models that it builds, saves and runs are loaded here and give the same tokens.

Needs torch and transformers (the `parity` extra); run with `-m parity`.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kimi_jax

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]  # warnings of other libraries are not ours

TOLERANCE = 2e-4  # of the largest logit, float32
NEW_TOKENS = 16
CLEAR_GAP = 1e-3  # between the two best logits of a greedy step, as a share of the largest: wider than the tolerance


class Case(NamedTuple):
    """What a random configuration must have; everything else is drawn from `seed`."""

    seed: int
    kinds: str  # a letter a layer: K for KDA, M for MLA
    q_lora: bool
    conv: int
    shared: int
    heads: int  # of MLA
    kda_heads: int
    dense: int = 1  # leading layers without experts
    dtype: str = "float32"  # of the saved file
    hub_lists: bool = True  # layer kinds as the hub's two lists, or as transformers' layer_types


CASES = [
    Case(0, "KKKM", q_lora=False, conv=4, shared=1, heads=8, kda_heads=8),
    Case(1, "KKKM", q_lora=True, conv=4, shared=3, heads=3, kda_heads=1, dtype="bfloat16"),
    Case(2, "KKMM", q_lora=True, conv=3, shared=1, heads=1, kda_heads=3, hub_lists=False),
    Case(3, "MKKM", q_lora=False, conv=2, shared=1, heads=3, kda_heads=8),
    Case(4, "MMK", q_lora=True, conv=4, shared=3, heads=8, kda_heads=3, dense=2),
    Case(5, "KM", q_lora=False, conv=2, shared=3, heads=1, kda_heads=1, dense=0, hub_lists=False),
    Case(6, "MK", q_lora=True, conv=3, shared=1, heads=3, kda_heads=3, dtype="bfloat16"),
    Case(7, "KMKM", q_lora=False, conv=3, shared=3, heads=8, kda_heads=1, hub_lists=False),
    Case(8, "KKKMKMM", q_lora=True, conv=4, shared=1, heads=3, kda_heads=8, dtype="bfloat16"),
    Case(9, "KKMMK", q_lora=False, conv=2, shared=1, heads=8, kda_heads=3, dense=0),
    Case(10, "MKM", q_lora=True, conv=2, shared=3, heads=1, kda_heads=8, hub_lists=False),
    Case(11, "KMK", q_lora=False, conv=4, shared=3, heads=3, kda_heads=1, dtype="bfloat16", dense=3),
    Case(12, "MKKK", q_lora=False, conv=4, shared=1, heads=1, kda_heads=8),
    Case(13, "KKM", q_lora=True, conv=2, shared=1, heads=8, kda_heads=8, dtype="bfloat16", hub_lists=False),
]


@pytest.fixture(scope="session")
def torch():
    found = pytest.importorskip("torch")
    found.set_num_threads(1)  # these matrices are small: on a busy machine more threads mostly wait for each other
    return found


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers")


def configuration(case: Case) -> dict[str, Any]:
    """Arguments of KimiLinearConfig: small sizes, mutually distinct where they could be mixed up."""
    pick = random.Random(case.seed)
    experts = pick.choice([4, 6, 9])
    nope, rope, value, kv_lora, q_lora, hidden = pick.sample(range(3, 17), 6)
    hidden = 40 + 4 * hidden  # torch's grouped product wants rows of whole 16 bytes
    linear = dict(linear_head_dim=pick.choice([5, 8, 12]), linear_num_heads=case.kda_heads)
    linear["linear_conv_kernel_dim"] = case.conv
    kinds: dict[str, Any] = dict(
        layer_types=["full_attention" if kind == "M" else "linear_attention" for kind in case.kinds],
        mlp_layer_types=["dense" if i < case.dense else "sparse" for i in range(len(case.kinds))],
        **linear,
    )
    if case.hub_lists:
        lists = {name: [i + 1 for i, k in enumerate(case.kinds) if k == kind]
                 for name, kind in (("kda_layers", "K"), ("full_attn_layers", "M"))}  # fmt: skip
        names = ("head_dim", "num_heads", "short_conv_kernel_size")
        kinds = dict(
            linear_attn_config=lists | dict(zip(names, linear.values(), strict=True)), first_k_dense_replace=case.dense
        )
    return dict(
        vocab_size=pick.randint(90, 150), hidden_size=hidden, num_hidden_layers=len(case.kinds),
        num_attention_heads=case.heads, num_key_value_heads=case.heads, q_lora_rank=q_lora if case.q_lora else None,
        kv_lora_rank=kv_lora, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
        intermediate_size=pick.choice([44, 52]), num_experts=experts,
        num_experts_per_token=pick.randint(1, experts - 1), num_shared_experts=case.shared,
        moe_intermediate_size=pick.choice([20, 28]), moe_renormalize=pick.random() < 0.7,
        routed_scaling_factor=pick.choice([1.0, 1.7, 2.446]), rms_norm_eps=pick.choice([1e-5, 1e-3]),
        model_max_length=512, bos_token_id=None, eos_token_id=None, pad_token_id=None, **kinds,
    )  # fmt: skip


def randomise(torch, model, seed: int) -> None:
    """Weights at which every part moves the logits: transformers' own start (std 0.02, no router bias) hides most."""
    rng = torch.Generator().manual_seed(seed)

    def normal(like):
        return torch.randn(like.shape, generator=rng)

    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # decay rates 1 to 16
            value = torch.log(1 + 15 * torch.rand(weight.shape, generator=rng))
        elif name.endswith("dt_bias"):  # steps 0.001 to 0.5
            value = torch.log(torch.expm1(torch.exp(torch.empty(weight.shape).uniform_(-6.9, -0.7, generator=rng))))
        elif weight.ndim == 1:  # norms
            value = 1 + 0.3 * normal(weight)
        elif "conv1d" in name:
            value = 0.5 * normal(weight)
        elif "embed_tokens" in name:
            value = normal(weight)
            value[5::8] *= 0.02  # small inputs of norms show their eps, here and in the latents
        else:
            gain = 3.0 if "lm_head" in name or ".q_" in name else 1.3
            value = gain * normal(weight) / weight.shape[-1] ** 0.5
        if "q_a_proj" in name:
            value *= 0.005
        elif "kv_a_proj" in name:
            value[: model.config.kv_lora_rank] *= 0.005
        weight.data.copy_(value)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(0.2 * normal(bias))


class Theirs(NamedTuple):
    """A saved checkpoint and what transformers computes with it."""

    folder: Path
    tokens: np.ndarray  # [2, T]
    logits: np.ndarray  # [2, T, W]
    prompts: list[list[int]]
    continued: list[list[int]]  # greedy, NEW_TOKENS each
    gap: float  # of the closest greedy choice, as a share of the largest logit


def continue_greedily(torch, model, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Their continuation, and the smallest lead of a token over the next best, as a share of the largest logit."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min() / best.abs().max())


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case.seed}-{case.kinds}")
def theirs(request, tmp_path_factory, torch, transformers) -> Theirs:
    """A saved model whose greedy choices are clear: at a near tie rounding would decide, so other weights are drawn."""
    folder = tmp_path_factory.mktemp("theirs")
    for weights in range(20):
        found = run_theirs(torch, transformers, request.param, weights, folder / str(weights))
        if found.gap > CLEAR_GAP:
            return found
    raise AssertionError("no clear choices in 20 draws of the weights")


def run_theirs(torch, transformers, case: Case, weights: int, folder: Path) -> Theirs:
    """Build, save, load back, and run."""
    config = transformers.KimiLinearConfig(**configuration(case))
    model = transformers.KimiLinearForCausalLM(config).eval()
    randomise(torch, model, 100 * case.seed + weights)
    shards = {"max_shard_size": "60KB"} if case.seed % 3 == 0 else {}
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, **shards)
    model = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    pick = np.random.default_rng(case.seed)
    tokens = pick.integers(0, config.vocab_size, (2, int(pick.integers(66, 90))))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    prompts = [tokens[0, : pick.integers(1, 12)].tolist(), tokens[1, : pick.integers(20, 66)].tolist()]
    continued, gaps = zip(*(continue_greedily(torch, model, prompt, NEW_TOKENS) for prompt in prompts), strict=True)
    return Theirs(folder, tokens, logits, prompts, list(continued), min(gaps))


@pytest.fixture(scope="module")
def ours(theirs):
    return kimi_jax.load(theirs.folder, dtype="float32", progress=False)


def test_the_cases_cover_what_they_should():
    assert len(CASES) >= 12
    assert {case.q_lora for case in CASES} == {True, False} and {case.conv for case in CASES} == {2, 3, 4}
    assert {case.shared for case in CASES} == {1, 3} and {case.heads for case in CASES} == {1, 3, 8}
    assert {case.kda_heads for case in CASES} == {1, 3, 8} and {case.hub_lists for case in CASES} == {True, False}
    assert any("MM" in case.kinds for case in CASES) and any(case.kinds[0] == "M" for case in CASES)


def test_logits_equal_those_of_transformers(theirs, ours):
    got, wanted = np.asarray(ours.logits(theirs.tokens)), theirs.logits
    assert got.shape == wanted.shape
    assert np.std(wanted) > 0.1 and len(set(wanted.argmax(-1).ravel().tolist())) > 10, "degenerate logits show nothing"
    assert np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_greedy_tokens_equal_those_of_transformers(theirs, ours):
    together = kimi_jax.generate(ours, theirs.prompts, max_new_tokens=NEW_TOKENS)
    assert [out.tokens for out in together] == theirs.continued
    assert all(len(set(tokens)) > 3 for tokens in theirs.continued), "a constant continuation shows nothing"


@pytest.fixture(scope="module")
def shipped(torch, transformers, tiny, data):
    """The golden prompts, and what transformers makes of them now with the shipped checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    golden = np.load(data / "golden" / "kimi-linear-tiny.npz")
    count = sum(name.startswith("ids_") for name in golden.files)
    prompts = [golden[f"ids_{i}"].tolist() for i in range(count)]
    continued = [continue_greedily(torch, model, prompt, 64)[0] for prompt in prompts]
    assert continued == [golden[f"greedy_{i}"].tolist() for i in range(count)]
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts]
    return prompts, continued, logits


@pytest.fixture(scope="module")
def shipped_ours():
    return kimi_jax.load(dtype="float32", progress=False)


def test_the_shipped_model_continues_every_golden_prompt_as_transformers_does(shipped, shipped_ours):
    prompts, continued, _ = shipped
    together = kimi_jax.generate(shipped_ours, prompts, max_new_tokens=64)
    assert [out.tokens for out in together] == continued
    for prompt, wanted in zip(prompts, continued, strict=True):
        (alone,) = kimi_jax.generate(shipped_ours, [prompt], max_new_tokens=64)
        assert alone.tokens == wanted


def test_the_shipped_model_gives_the_logits_of_transformers(shipped, shipped_ours):
    prompts, _, logits = shipped
    for prompt, wanted in zip(prompts, logits, strict=True):
        got = np.asarray(shipped_ours.logits(np.array([prompt])))[0]
        assert np.abs(got - wanted).max() <= TOLERANCE * np.abs(wanted).max()
