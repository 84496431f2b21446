"""Models with experts in every layout against transformers, and a balance loss in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megappo.errors import ModelError
from megappo.models.build import check_layout
from megappo.models.name_map import canonical_name, hf_names
from megappo.models.spec import load_spec, spec_from_config
from tests.distributed.launch import run_ranks
from tests.distributed.test_models import assert_close_in_scale, config_json, stored
from tests.distributed.tiny_models import MOE_MODELS, save_tiny_model, sequences

LAYOUTS = {
    "one_rank": (1,),
    "ep2": (2, "--ep", "2"),
    "pp2_recompute": (2, "--pp", "2", "--recompute", "full"),
    "cp2": (2, "--cp", "2"),
    "tp2_etp2": (2, "--tp", "2"),
    "tp2_ep2_etp1_dp2": (4, "--tp", "2", "--ep", "2", "--etp", "1"),
    "tp2_ep2_etp2_dp2": (4, "--tp", "2", "--ep", "2"),
    "pp2_ep2_dp2": (4, "--pp", "2", "--ep", "2"),
}
"""EP takes its ranks from TP and DP; sequence parallelism is on wherever TP is."""
NUM_TOKENS = sum(len(ids) for ids in sequences())


@pytest.fixture(scope="session")
def moe_models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("moe_models")
    for name, settings in MOE_MODELS.items():
        save_tiny_model(root / name, settings)
    return root


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Sums over the batch, not divided."""

    outputs: torch.Tensor
    main: dict[str, torch.Tensor]
    """Gradients of the main loss."""
    balance: float
    balance_gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def oracles(moe_models) -> dict[str, Expected]:
    return {name: oracle(moe_models / name) for name in MOE_MODELS}


def oracle(folder: Path) -> Expected:
    """One unpadded sequence at a time through transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    weights = torch.linspace(-1, 1, NUM_TOKENS)
    choices: list[tuple[torch.Tensor, ...]] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, out: choices.append(out))
    outputs, main, balance, start = [], torch.zeros(()), torch.zeros(()), 0
    for ids in sequences():
        choices.clear()
        out = model(ids[None])
        here = weights[start : start + len(ids)]
        start += len(ids)
        log_p = out.logits[0].log_softmax(-1)
        targets = torch.cat([ids[1:], ids.new_zeros(1)])
        entropy = -(log_p.exp() * log_p).sum(-1)
        per_token = log_p.gather(-1, targets[:, None])[:, 0] + 0.3 * entropy
        main = main + (per_token * here).sum()
        assert choices
        for logits, _, chosen in choices:
            balance = balance + balance_of(logits, chosen, model.config.model_type)
        outputs.append(out.logits[0].detach())
    return Expected(
        outputs=torch.cat(outputs),
        main=gradients_of(model, main),
        balance=balance.item(),
        balance_gradients=gradients_of(model, balance),
    )


def balance_of(logits: torch.Tensor, chosen: torch.Tensor, model_type: str) -> torch.Tensor:
    """DeepSeek-V3 eq. 17-20 for one sequence and one layer, expert by expert."""
    tokens, experts = logits.shape
    if model_type in ("deepseek_v3", "glm4_moe"):
        p = torch.sigmoid(logits)
        p = p / p.sum(dim=-1, keepdim=True)
    else:
        p = torch.softmax(logits, dim=-1)
    total = torch.zeros(())
    for i in range(experts):
        f = experts / (chosen.shape[1] * tokens) * (chosen == i).sum()
        total = total + f * p[:, i].mean()
    return total


ON_DISK = {"mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}}


def gradients_of(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Under the names on disk: transformers stacks the experts in memory."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    names = ON_DISK.get(model.config.model_type, {})
    found = {}
    for memory_name, parameter in model.named_parameters():
        name = memory_name.replace(".mlp.", ".block_sparse_moe.") if names else memory_name
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = gradient
            continue
        for expert, own in enumerate(gradient):
            halves = own.chunk(2) if kind == "gate_up_proj" else (own,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, half in zip(kinds, halves, strict=True):
                found[f"{stem}.{expert}.{names.get(part, part)}.weight"] = half
    return found


def norm(gradients: dict[str, torch.Tensor]) -> float:
    # In float32 the sum over this many numbers is off by 2e-5.
    return torch.cat([g.flatten().double() for g in gradients.values()]).norm().item()


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_transformers_and_the_formula_do(
    moe_models, oracles, layout, tmp_path
):
    num_ranks, *flags = LAYOUTS[layout]
    where = ("--models", str(moe_models), "--out", str(tmp_path))
    run_ranks("moe.py", num_ranks, *where, *flags, timeout_s=300)
    for name, expected in oracles.items():
        ranks = [torch.load(tmp_path / name / f"rank{r}.pt") for r in range(num_ranks)]
        check_outputs(ranks, expected)
        check_gradients(ranks, expected)
        check_balance(ranks, expected)
        before, after = stored(moe_models / name), stored(tmp_path / name / "saved")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)


def check_outputs(ranks: list[dict], expected: Expected) -> None:
    found = torch.full_like(expected.outputs, torch.nan)
    for rank in ranks:
        for origin, logits in rank["main"]["outputs"]:
            found[origin] = logits
    assert (found - expected.outputs).abs().max() < 1e-4


def check_gradients(ranks: list[dict], expected: Expected) -> None:
    """The main loss is divided by its tokens, the balance loss is a mean over sequences."""
    main = {n: g / NUM_TOKENS for n, g in expected.main.items()}
    share = 0.1 / len(sequences())
    balance = {n: g * share for n, g in expected.balance_gradients.items()}
    both = {n: main[n] + balance[n] for n in main}
    wanted = {"main": main, "both": both} | {
        f"balance_in_{n}": balance for n in ("one", "two", "three")
    }
    for rank in ranks:
        for which, gradients in wanted.items():
            result = rank[which]
            assert result["copies_equal"]
            assert result["norm"] == pytest.approx(norm(gradients), rel=2e-6)
            assert result["gradients"].keys() == gradients.keys()
            for parameter, gradient in gradients.items():
                assert_close_in_scale(result["gradients"][parameter], gradient, 2e-5)
        assert rank["neither"]["norm"] == 0.0
        assert all(not g.any() for g in rank["neither"]["gradients"].values())


def check_balance(ranks: list[dict], expected: Expected) -> None:
    for which in ("balance_in_one", "balance_in_two", "balance_in_three", "both"):
        found = sum(rank[which]["balance"] for rank in ranks)
        assert found == pytest.approx(expected.balance, rel=1e-5)
    for rank in ranks:
        assert rank["without_gradients"] == 0.0
    # Measured also where it has no coefficient, and the gradients are then those of the main loss.
    found = sum(rank["main"]["balance"] for rank in ranks)
    assert found == pytest.approx(expected.balance, rel=1e-5)


def test_names_and_shapes_on_disk_are_the_expected_ones(moe_models):
    for name in MOE_MODELS:
        spec = load_spec(moe_models / name)
        expected = {n for n in hf_names(spec) if n != "lm_head.weight" or not spec.tied}
        found = stored(moe_models / name)
        assert expected == found.keys()
        assert all(tuple(found[n].shape) == shape for n, shape in hf_names(spec).items())


def test_local_and_grouped_expert_names_are_one():
    moe_layers = (False, False, False, True)
    expected = "decoder.layers.3.mlp.experts.linear_fc2.weight9"
    for local in (
        "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight",
        "decoder.layers.1.mlp.experts.linear_fc2.weight5",
    ):
        assert canonical_name(local, 2, expert_offset=4, moe_layers=moe_layers) == expected
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"
    assert canonical_name(norm, 2, moe_layers=moe_layers) == norm.replace(".1.", ".3.")
    dense = "decoder.layers.2.mlp.linear_fc1.layer_norm_weight"
    assert canonical_name(norm, 1, moe_layers=moe_layers) == dense


@pytest.mark.parametrize("name", MOE_MODELS)
def test_spec_agrees_with_transformers(moe_models, name):
    from transformers import AutoConfig, AutoModelForCausalLM

    spec, config = load_spec(moe_models / name), AutoConfig.from_pretrained(moe_models / name)
    layers = AutoModelForCausalLM.from_config(config).model.layers
    assert spec.moe_layers == tuple(hasattr(layer.mlp, "experts") for layer in layers)
    experts = layers[-1].mlp.experts
    assert (spec.num_experts, spec.experts_per_token) == (
        experts.num_experts,
        config.num_experts_per_tok,
    )
    assert spec.norm_topk_prob == getattr(config, "norm_topk_prob", True)
    shared = getattr(layers[-1].mlp, "shared_experts", None)
    assert spec.shared_ffn_hidden_size == (len(shared.up_proj.weight) if shared else 0)


def moe_json(**settings) -> dict:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return config_json("qwen3_moe", head_dim=16, **(experts | settings))


def test_layers_with_experts_follow_both_rules():
    spec = spec_from_config(moe_json(decoder_sparse_step=2, mlp_only_layers=[3]))
    assert spec.moe_layers == (False, True, False, False)
    # Names of released configs, of transformers 5, and what steers transformers' own loss only.
    released = moe_json(max_window_layers=48, output_router_logits=False, router_aux_loss_coef=0.01)
    assert spec_from_config(released).moe_layers == (True,) * 4
    renamed = moe_json(num_experts=None, num_local_experts=8)
    assert spec_from_config(renamed).num_experts == 8


REFUSED = {
    "attention bias": (moe_json(attention_bias=True), "attention_bias=True"),
    "window": (moe_json(use_sliding_window=True, sliding_window=64), "64 tokens"),
    "layer types": (moe_json(layer_types=["sliding_attention"]), "sliding_attention"),
    "no count": (moe_json(num_experts=None), "lacks num_experts"),
    "no size": (moe_json(moe_intermediate_size=None), "lacks moe_intermediate_size"),
    "two counts": (moe_json(num_local_experts=4), "num_experts=8, num_local_experts=4"),
    "too many": (moe_json(num_experts_per_tok=9), "9 of 8"),
    "one of one": (moe_json(num_experts_per_tok=1, norm_topk_prob=True), "norm_topk_prob=false"),
    "no step": (moe_json(decoder_sparse_step=0), "at least 1, not 0"),
    "all dense": (moe_json(mlp_only_layers=[0, 1, 2, 3]), "leave none of the 4 layers"),
    "shared experts": (
        moe_json(shared_expert_intermediate_size=32),
        "shared_expert_intermediate_size=32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_would_change_the_experts_is_refused(case):
    config, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)


def test_layouts_that_experts_cannot_have_are_refused_with_the_numbers():
    spec = replace(spec_from_config(moe_json()), num_heads=8, num_kv_heads=4)
    sp = {"sequence_parallel": True}
    check_layout(spec, tp=1, pp=2, ep=8)
    check_layout(spec, tp=2, pp=1, **sp)
    check_layout(spec, tp=4, pp=1, ep=2, etp=2, **sp)
    for layout, message in (
        ({"tp": 1, "ep": 3}, "experts must divide .*: 8 over 3"),
        ({"tp": 2, "etp": 4} | sp, "parallel.etp must divide parallel.tp: 4 and 2"),
        ({"tp": 2}, "experts under parallel.tp=2 need sequence parallelism"),
        ({"tp": 4, "etp": 2} | sp, "parallel.etp=2 below parallel.tp=4 .* or parallel.ep=2"),
    ):
        with pytest.raises(ModelError, match=message):
            check_layout(spec, pp=1, **layout)
    with pytest.raises(ModelError, match=r"an expert's columns .*: 42 over 4"):
        check_layout(replace(spec, moe_ffn_hidden_size=42), tp=4, pp=1, **sp)


def test_only_layers_that_are_dense_ask_for_their_width_to_divide():
    spec = replace(spec_from_config(moe_json()), ffn_hidden_size=97)
    check_layout(spec, tp=2, pp=1, sequence_parallel=True)
    mixed = replace(spec, moe_layers=(True, False, True, True))
    with pytest.raises(ModelError, match="97 over 2"):
        check_layout(mixed, tp=2, pp=1, sequence_parallel=True)


def test_a_dense_model_has_nothing_to_spread():
    dense = spec_from_config(config_json("llama"))
    check_layout(dense, tp=2, pp=1, etp=2)
    for layout in ({"ep": 2}, {"tp": 2, "etp": 1}):
        with pytest.raises(ModelError, match="a llama model has no experts"):
            check_layout(dense, **({"tp": 1, "pp": 1} | layout))
