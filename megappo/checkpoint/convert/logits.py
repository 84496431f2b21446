"""Logits of a Hugging Face folder by transformers against those of a checkpoint by Megatron.

Both in float32 on the CPU, so that what is left is the conversion. A torch_dist checkpoint is
loaded by Megatron's own loader, others parameter by parameter; neither goes through Hugging Face
tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megappo.checkpoint.convert.checkpoint import CheckpointTensors
from megappo.checkpoint.convert.load_model import load_model
from megappo.checkpoint.convert.place import Place
from megappo.distributed import parallel
from megappo.distributed.environment import LaunchEnvironment
from megappo.distributed.parallel import Degrees
from megappo.errors import CheckpointError
from megappo.models import build, packing, weights
from megappo.models.spec import ModelSpec, load_spec

SHORT_TOKENS = 24
LONG_TOKENS = 1024
"""Length of the long prompt, or the model's longest if that is less."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest absolute difference of logits over the vocabulary."""

    short: float
    """At the positions of a short prompt."""
    late: float
    """At the last positions of a long one."""
    late_position: int
    same_choice: bool
    """Both give every position's largest logit to the same token."""


def compare_logits(hf: Place, other: Place, *, trust_remote_code: bool) -> Difference:
    """Runs both models on the same tokens, drawn with a fixed seed.

    Args:
        hf: A Hugging Face folder.
        other: The same model in any format.
        trust_remote_code: As `load_spec` takes it; transformers too runs its own code alone.

    Raises:
        CheckpointError: a critic, which has no logits.
    """
    spec = load_spec(hf.folder, trust_remote_code=trust_remote_code)
    _check_has_logits(other, spec)
    generator = torch.Generator().manual_seed(0)
    long_tokens = min(LONG_TOKENS, spec.max_positions)
    prompts = [
        torch.randint(spec.vocab_size, (length,), generator=generator)
        for length in (min(SHORT_TOKENS, long_tokens), long_tokens)
    ]
    expected = _by_transformers(hf.folder, prompts)
    with warnings.catch_warnings():  # of torch's about what Megatron's loader calls
        warnings.simplefilter("ignore", FutureWarning)
        actual = _by_megatron(other, spec, prompts)
    gaps = [(a - e).abs().max().item() for a, e in zip(actual, expected, strict=True)]
    same = all(
        torch.equal(a.argmax(-1), e.argmax(-1)) for a, e in zip(actual, expected, strict=True)
    )
    return Difference(short=gaps[0], late=gaps[1], late_position=long_tokens, same_choice=same)


def _check_has_logits(place: Place, spec: ModelSpec) -> None:
    if place.format != "huggingface":
        with CheckpointTensors(place, spec) as tensors:
            if tensors.head == "value":
                raise CheckpointError(f"{place.folder} is a critic, which has no logits")


def _kept(logits: Tensor) -> Tensor:
    """The last positions of a prompt, [<= SHORT_TOKENS, V] float32."""
    return logits[-SHORT_TOKENS:].detach().float().clone()


def _by_transformers(folder: Path, prompts: list[Tensor]) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        return [_kept(model(prompt[None]).logits[0]) for prompt in prompts]


def _by_megatron(place: Place, spec: ModelSpec, prompts: list[Tensor]) -> list[Tensor]:
    with _one_rank(), torch.no_grad():
        config = build.transformer_config(spec, tp=1, pp=1)
        model = build.build_chunk(spec, config, head="lm", pre_process=True, post_process=True)
        _fill(model, place, spec)
        model.eval()
        found = []
        for prompt in prompts:
            batch = packing.pack([prompt])
            logits = model(
                batch.tokens,
                batch.position_ids,
                None,
                packed_seq_params=packing.packed_seq_params(batch),
            )
            found.append(_kept(logits.flatten(0, 1)[: len(prompt), : spec.vocab_size]))
        return found


@contextmanager
def _one_rank() -> Iterator[None]:
    launch = LaunchEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1)
    context = parallel.start(launch, Degrees(), device="cpu", seed=0, timeout_s=600)
    try:
        yield
    finally:
        parallel.stop(context)


def _fill(model: Any, place: Place, spec: ModelSpec) -> None:
    if place.format == "huggingface":
        weights.load_hf_weights([model], place.folder, spec)
    elif place.format == "torch_dist":
        load_model([model], place.folder)
    else:
        _copy_parameters(model, place, spec)


def _copy_parameters(model: Any, place: Place, spec: ModelSpec) -> None:
    with CheckpointTensors(place, spec) as tensors:
        for name, parameter in weights.named_weights([model], spec):
            assert isinstance(parameter, Tensor), "weights are loaded before they are sharded"
            found = tensors.parameter(name)
            parameter.copy_(found[: len(parameter)])
