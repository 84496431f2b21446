"""What can be wrong with data files, rewards and prompts, found before a model is loaded."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from megappo.config import Config
from megappo.config.findings import Findings
from megappo.config.sections import ModelSection
from megappo.data.curriculum import CurriculumSampler, Preference
from megappo.data.prompts import PromptDataset, check_files, read_data_sources
from megappo.data.sampler import PromptSampler, Sampler
from megappo.data.source_shares import SourceSampler
from megappo.errors import ModelError
from megappo.models.spec import has_tokenizer
from megappo.rewards import resolve
from megappo.trainer.reward_model_checks import check_reward_model


@dataclass(kw_only=True)
class Rows:
    """What was found out about data files, as far as nothing was wrong."""

    tokenizer: Any = None
    sets: dict[str, PromptDataset] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=lambda: {"train": [], "val": []})
    num_train_rows: int | None = None
    """of the files, usable or not; None where they cannot be read"""
    sampler: Sampler | None = None
    warnings: list[str] = field(default_factory=list)


def check_rows(config: Config, found: Findings, *, read_all_rows: bool) -> Rows:
    """Files, rewards, and with the tokenizer, if there is one, prompts."""
    rows = Rows()
    files = {"train": config.data.train_files, "val": config.data.val_files}
    if has_tokenizer(config.model.path):
        rows.tokenizer = found.attempt(partial(load_tokenizer, config.model))
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
    rows.num_train_rows = num_rows.get("train")
    all_sources = {source for sources in rows.sources.values() for source in sources}
    found.attempt(partial(resolve, all_sources, config.reward))
    if rows.tokenizer is not None:
        check = partial(
            check_reward_model,
            config,
            rows.tokenizer,
            lambda path: load_tokenizer(replace(config.model, path=path), "reward_model.path"),
            all_sources,
        )
        rows.warnings += found.attempt(check) or []
    if "train" in rows.sets and config.data.truncation == "drop":
        num_rows["train"] = found.attempt(rows.sets["train"].__len__)
    if num_rows.get("train") is not None:
        rows.sampler = found.attempt(
            partial(_sampler, config, rows.sets.get("train"), num_rows["train"]),
            needs=(
                "data.train_batch_size",
                "data.truncation",
                "data.max_prompt_length",
                "data.source_weights",
                "data.curriculum",
            ),
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


def _sampler(config: Config, rows: PromptDataset | None, num_rows: int | None) -> Sampler:
    """The order that the config asks for; without a tokenizer, so for no run, the plain one."""
    assert num_rows is not None
    data = config.data
    order: dict[str, Any] = {
        "batch_size": data.train_batch_size,
        "seed": config.trainer.seed,
        "shuffle": data.shuffle,
        "num_dropped": rows.num_dropped if rows is not None else 0,
    }
    if data.source_weights and rows is not None:
        return SourceSampler(rows.source_of_each(), weights=data.source_weights, **order)
    if data.curriculum == "score":
        preference = Preference(
            target=data.curriculum_target,
            width=data.curriculum_width,
            floor=data.curriculum_floor,
            smoothing=data.curriculum_smoothing,
        )
        return CurriculumSampler(num_rows, preference=preference, **order)
    return PromptSampler(num_rows, **order)


def load_tokenizer(model: ModelSection, key: str = "model.path") -> Any:
    """The tokenizer of a model's folder.

    Args:
        model: whose folder, and whether code in it may run.
        key: of the folder, for the message.

    Raises:
        ModelError: it cannot be loaded.
    """
    with warnings.catch_warnings():
        # The CPU set-up has torchvision without its image library, which nothing here uses.
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            model.path,
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"the tokenizer in {key} {model.path} cannot be loaded: {first}"
        ) from error


def check_token_ids(tokenizer: Any, vocab_size: int, folder: str) -> None:
    """Whether the model has an embedding for every token; more embeddings than tokens are usual.

    Args:
        tokenizer: of the folder.
        vocab_size: of its config.json.
        folder: for the message.

    Raises:
        ModelError: naming tokens without one.
    """
    beyond = sorted((id_, text) for text, id_ in tokenizer.get_vocab().items() if id_ >= vocab_size)
    if not beyond:
        return
    named = ", ".join(f"{text!r} ({id_})" for id_, text in beyond[:4])
    more = f" and {len(beyond) - 4} more" if len(beyond) > 4 else ""
    raise ModelError(
        f"the tokenizer in model.path {folder} has tokens that its model has no embedding for: "
        f"{named}{more}; config.json's vocab_size is {vocab_size}, so ids must be under it: copy "
        "the tokenizer that belongs to the model, or add rows to the model "
        "(transformers' resize_token_embeddings)"
    )


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
