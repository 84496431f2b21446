"""Whether a folder can serve as the reward model of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megappo.config import Config
from megappo.errors import DataError, ModelError, UserError
from megappo.models.hf_folder import TensorFolder
from megappo.models.name_map import VALUE_HEAD
from megappo.rewards import MODEL_ONLY


def check_reward_model(
    config: Config, tokenizer: Any, load: Callable[[str], Any], sources: set[str]
) -> list[str]:
    """Checks whether the reward model reads what the actor writes; for its head see `check_head`.

    Args:
        config: of the run.
        tokenizer: of the actor.
        load: reads the tokenizer of a folder.
        sources: every `data_source` of the run.

    Returns:
        Warnings.

    Raises:
        ModelError: it has another tokenizer than the actor.
        DataError: rows ask for a reward model, and there is none.
        UserError: a part of reward.sources gives it a weight.
    """
    path = config.reward_model.path
    _check_parts(config, sources)
    if not path:
        return []
    own = load(path)
    if own.get_vocab() != tokenizer.get_vocab() or own.eos_token_id != tokenizer.eos_token_id:
        raise ModelError(
            f"reward_model.path {path} has another tokenizer than model.path {config.model.path} "
            f"({len(own.get_vocab())} tokens with end token {own.eos_token_id}, and "
            f"{len(tokenizer.get_vocab())} with {tokenizer.eos_token_id}): a reward model reads "
            "the ids that were sampled; train one from a model with the actor's tokenizer"
        )
    if own.chat_template != tokenizer.chat_template:
        return [
            "the reward model's folder has another chat template than the actor's: it scores "
            "prompts as the actor's template writes them"
        ]
    return []


def _check_parts(config: Config, sources: set[str]) -> None:
    """Whether the rewards that data_sources stand for ask for the reward model as they may."""
    for source in sorted(sources):
        for part in config.reward.parts(source):
            if part.name != MODEL_ONLY:
                continue
            if not config.reward_model.path:
                raise DataError(
                    f"rows have data_source {source!r}, which stands for {MODEL_ONLY!r}, and "
                    "reward_model.path is '': name the model that scores them, or give them the "
                    "data_source of a rule"
                )
            if part.weight != 1:
                raise UserError(
                    f"reward.sources.{source} gives {MODEL_ONLY!r} the weight {part.weight:g}, "
                    "which would do nothing, for the model scores every row alike: leave it out "
                    "and set reward_model.weight"
                )


def check_head(folder: Path) -> None:
    """Whether a folder's weights have a head with one label. By the tensor, not by config.json.

    Transformers leaves the number of labels out of a config.json where it is 2.

    Raises:
        ModelError: it has none, or one with several labels; or the weights cannot be read.
    """
    try:
        with TensorFolder(folder) as tensors:
            has_head = VALUE_HEAD in tensors.names()
            labels = tensors.shape(VALUE_HEAD)[0] if has_head else 0
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelError(
            f"the weights in {folder} cannot be read: {error}; download the folder again"
        ) from error
    if not has_head:
        raise ModelError(
            f"reward_model.path {folder} has no {VALUE_HEAD}: it is no sequence classifier; "
            "train one from it (megappo train-rm)"
        )
    if labels != 1:
        raise ModelError(
            f"reward_model.path {folder} is a classifier with {labels} labels: a reward model has "
            "one; choose another folder, or train one (megappo train-rm)"
        )
