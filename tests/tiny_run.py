"""Everything a small real run needs, made in a folder: random model, tokenizer, data, config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megappo.data.arithmetic import write_dataset

CONFIG = """\
model: {{path: "{root}/model", dtype: float32}}
data:
  train_files: ["{root}/data/train.parquet"]
  val_files: ["{root}/data/val.parquet"]
  train_batch_size: 8
  max_prompt_length: 128
rollout: {{n: 4, temperature: 1.5, max_response_length: 3, max_running_requests: 32}}
reward: {{gsm8k_method: flexible}}
algorithm: {{use_kl_in_reward: true, kl_ctrl: adaptive, kl_coef: 0.01, horizon: 100}}
actor:
  optim: {{lr: 1.0e-3, eps: 1.0e-3, lr_warmup_steps: 2, lr_decay_style: cosine}}
  mini_batch_size: 4
  micro_batch_size: 4
critic:
  optim: {{lr: 1.0e-3, eps: 1.0e-3}}
  micro_batch_size: 4
trainer: {{run_dir: "{root}/run", total_steps: 4, test_freq: 2, save_freq: 2}}
guard: {{check_ranks_every: 2}}
"""


def make_run(root: Path, **model_settings: Any) -> Path:
    """Writes `model/`, `data/` and `run.yaml` below `root`; returns the config's path."""
    make_model(root / "model", **model_settings)
    write_dataset(root / "data", seed=0, num_train=64, num_val=12)
    config = root / "run.yaml"
    config.write_text(CONFIG.format(root=root))
    return config


def write_digits_only(model: Any, tokenizer: Any) -> None:
    """Makes an untied random model write digits and end tokens, so that some scores are 1.

    Column 0 of the residual stream is large for every token, and only the rows of the wanted
    tokens have a positive weight for it.
    """
    digits = tokenizer.convert_tokens_to_ids(list("123456789"))
    model.model.embed_tokens.weight[:, 0] = 3.0
    model.lm_head.weight[:, 0] = -2.0
    model.lm_head.weight[digits, 0] = 2.0
    model.lm_head.weight[tokenizer.eos_token_id, 0] = 2.8


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "head_dim": 16,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, *, family: str = "qwen2", seed: int = 0, **settings: Any) -> None:
    """A random model of 4 layers with a byte-level tokenizer, as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    values = {
        "vocab_size": len(tokenizer) + 2,  # odd, so that TP pads it
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "qwen3_moe":
        values |= EXPERTS
    config = AutoConfig.for_model(family, **values | settings)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape))
        if not model.config.tie_word_embeddings:
            write_digits_only(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer() -> Any:
    """One token a byte, plus the ChatML marks; no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *letters])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return tokenizer
