"""Every recipe in configs/ passes `megappo check` on the machines that its comments name.

Model folders are made here with the sizes that the models' publishers give in config.json, and a
small tokenizer; they hold no weights.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.data.arithmetic import write_dataset
from megappo.data.gsm8k import convert
from tests.tiny_run import make_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"

QWEN2_5 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
MODELS = {
    "Qwen2.5-0.5B-Instruct": QWEN2_5
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": QWEN2_5
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B-Instruct": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "tiny": QWEN2_5
    | {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "eos_token_id": 2,
    },
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    },
}

# Recipe -> ranks, nodes, the line that says how they are laid out.
LAYOUTS = {
    "quickstart.yaml": (2, 1, "2 ranks = TP 1 x PP 1 x CP 1 x DP 2"),
    "smollm2_arithmetic.yaml": (2, 1, "2 ranks = TP 1 x PP 1 x CP 1 x DP 2"),
    "qwen2.5_0.5b_gsm8k.yaml": (8, 1, "8 ranks = TP 1 x PP 1 x CP 1 x DP 8"),
    "qwen2.5_7b_gsm8k.yaml": (8, 1, "8 ranks = TP 4 x PP 1 x CP 1 x DP 2"),
    "llama3.1_70b_gsm8k.yaml": (64, 8, "64 ranks = TP 8 x PP 4 x CP 1 x DP 2"),
    "qwen3_30b_a3b_gsm8k.yaml": (16, 2, "DP 16; experts EP 8 x ETP 1"),
}

IN_A_ROW = {"sft.yaml", "reward_model.yaml", "rlhf_ppo.yaml"}
"""Each starts from what the one before has written: tools/rlhf_demo.sh runs them."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the models and data that the recipes name, relative to it."""
    root = tmp_path_factory.mktemp("recipes")
    tokenizer = make_tokenizer()
    for name, values in MODELS.items():
        folder = root / "models" / name
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(values))
    rows = [{"question": f"What is {i}?", "answer": f"It is {i}.\n#### {i}"} for i in range(1200)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        convert(root / "rows.jsonl", root / "data" / "gsm8k" / f"{name}.parquet", split=name)
    write_dataset(root / "data" / "arithmetic", seed=0, num_train=64, num_val=8)
    write_dataset(root / "data" / "smollm2", seed=0, num_train=16, num_val=8)
    return root


def test_every_recipe_has_a_layout_here():
    assert {*LAYOUTS, *IN_A_ROW} == {path.name for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_recipe_passes_the_check_without_a_warning(place, capsys, monkeypatch, name):
    monkeypatch.chdir(place)
    ranks, nodes, layout = LAYOUTS[name]
    # The small tokenizer makes a token of every byte, so prompts are longer than the models' are.
    longer = ["data.max_prompt_length=200"] if "gsm8k" not in name else []
    code = main(
        ["check", str(CONFIGS / name), *longer, "--no-weights",
         "--world-size", str(ranks), "--nodes", str(nodes)]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert layout in shown.out
    assert "warning" not in shown.out, shown.out


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_recipes_comment_tells_to_run_fits_its_layout(name):
    text = (CONFIGS / name).read_text()
    found = re.search(r"--world-size (\d+)(?: --nodes (\d+))?", text)
    if found is None:
        assert name in ("quickstart.yaml", "smollm2_arithmetic.yaml")
        return
    ranks, nodes, _ = LAYOUTS[name]
    assert (int(found[1]), int(found[2] or 1)) == (ranks, nodes)
    assert f"configs{os.sep}{name}" in text
