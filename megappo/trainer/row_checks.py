"""What can be wrong with data files, rewards and prompts, found before a model is loaded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megappo.config import Config
from megappo.config.findings import Findings
from megappo.data.prompts import PromptDataset, check_files, read_data_sources
from megappo.data.sampler import PromptSampler
from megappo.errors import ModelError
from megappo.models.spec import has_tokenizer
from megappo.rewards import resolve


@dataclass(kw_only=True)
class Rows:
    """What was found out about data files, as far as nothing was wrong."""

    tokenizer: Any = None
    sets: dict[str, PromptDataset] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=lambda: {"train": [], "val": []})
    sampler: PromptSampler | None = None


def check_rows(config: Config, found: Findings, *, read_all_rows: bool) -> Rows:
    """Files, rewards, and with the tokenizer, if there is one, prompts."""
    rows = Rows()
    files = {"train": config.data.train_files, "val": config.data.val_files}
    if has_tokenizer(config.model.path):
        rows.tokenizer = found.attempt(partial(_load_tokenizer, config))
    num_rows: dict[str, int | None] = {}
    for name, paths in files.items():
        if not paths:  # refused by the config's own rules where they are needed
            continue
        key = config.data.prompt_key
        num_rows[name] = found.attempt(
            partial(check_files, paths, prompt_key=key, name=name), needs=("data.prompt_key",)
        )
        if num_rows[name] is None:
            continue
        sources = found.attempt(partial(read_data_sources, paths, prompt_key=key, name=name))
        rows.sources[name] = sources or []
        if rows.tokenizer is not None:
            rows.sets[name] = _dataset(config, rows.tokenizer, name)
            _check_prompts(rows.sets[name], config, found, read_all_rows=read_all_rows)
    all_sources = {source for sources in rows.sources.values() for source in sources}
    found.attempt(partial(resolve, all_sources, config.reward))
    if "train" in rows.sets and config.data.truncation == "drop":
        num_rows["train"] = found.attempt(rows.sets["train"].__len__)
    if num_rows.get("train") is not None:
        rows.sampler = found.attempt(
            partial(_sampler, config, rows.sets.get("train"), num_rows["train"]),
            needs=("data.train_batch_size", "data.truncation", "data.max_prompt_length"),
        )
    return rows


def _check_prompts(
    rows: PromptDataset, config: Config, found: Findings, *, read_all_rows: bool
) -> None:
    needs = ("data.max_prompt_length", "data.truncation")
    # With truncation `drop` the length renders all, and finds "all rows too long".
    usable = found.attempt(rows.__len__, needs=needs)
    if read_all_rows:
        found.attempt(rows.check_ground_truths)
        if config.data.truncation != "drop" and usable is not None:
            found.attempt(rows.check_prompts, needs=needs)


def _sampler(config: Config, rows: PromptDataset | None, num_rows: int | None) -> PromptSampler:
    assert num_rows is not None
    return PromptSampler(
        num_rows,
        batch_size=config.data.train_batch_size,
        seed=config.trainer.seed,
        shuffle=config.data.shuffle,
        num_dropped=rows.num_dropped if rows is not None else 0,
    )


def _load_tokenizer(config: Config) -> Any:
    with warnings.catch_warnings():
        # The CPU set-up has torchvision without its image library, which nothing here uses.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            config.model.path,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"the tokenizer in model.path {config.model.path} cannot be loaded: {first}"
        ) from error


def _dataset(config: Config, tokenizer: Any, name: str) -> PromptDataset:
    files = config.data.train_files if name == "train" else config.data.val_files
    return PromptDataset(
        files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        truncation=config.data.truncation,
        prompt_key=config.data.prompt_key,
        name=name,
    )
