"""Generates with the in-process engine on tiny models in one layout; each rank writes its answers.

Every request is brought by one rank of the TP group only, so an answer shows that the ranks share
their work and hand it back to who asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from megappo.distributed import parallel
from megappo.distributed.parallel import Degrees, LaunchEnvironment, ParallelContext
from megappo.errors import UserError
from megappo.models.build import build_chunk, transformer_config
from megappo.models.hf_export import export_hf
from megappo.models.packing import pack, packed_seq_params
from megappo.models.spec import load_spec
from megappo.models.weights import load_hf_weights
from megappo.rollout.engine import GenerationRequest
from megappo.rollout.megatron_engine import MegatronEngine
from megappo.rollout.sampling import SamplingSettings

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_models import sequences


class Words:
    """Decodes id 7 as `w7 `, id 1 as the end token."""

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(f"w{i} " for i in ids if not (skip_special_tokens and i == 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sp", action="store_true")
    arguments = parser.parse_args()
    launch = LaunchEnvironment.read()
    context = parallel.start(
        launch, Degrees(tp=arguments.tp, etp=arguments.tp), device="cpu", seed=1, timeout_s=300
    )
    found = {
        folder.name: run_model(folder, context, arguments)
        for folder in sorted(arguments.models.iterdir())
    }
    (arguments.out / f"rank_{launch.rank}.json").write_text(json.dumps(found))
    parallel.stop(context)


def run_model(
    folder: Path, context: ParallelContext, arguments: argparse.Namespace
) -> dict[str, Any]:
    spec = load_spec(folder)
    config = transformer_config(spec, tp=context.tp, pp=1, sequence_parallel=arguments.sp)
    chunk = build_chunk(spec, config, head="lm", pre_process=True, post_process=True)
    load_hf_weights([chunk], folder, spec, head="lm")
    engine = MegatronEngine(
        chunk=chunk, vocab_size=spec.vocab_size, memory=None, context=context, tokenizer=Words(),
        end_tokens=frozenset({1}), context_length=64, max_running_requests=3,
    )  # fmt: skip
    prompts = [tuple(ids.tolist()) for ids in sequences()]

    def ask(sampling: SamplingSettings, order: list[int]) -> dict[int, dict[str, Any]]:
        """Answers by request: prompt i with seed 100 + i; this rank asks every tp-th of `order`."""
        mine = order[context.tp_rank :: context.tp]
        requests = [
            GenerationRequest(token_ids=prompts[i % 5], seed=100 + i, sampling=sampling)
            for i in mine
        ]
        answers = engine.generate(requests)
        return {i: dataclasses.asdict(a) for i, a in zip(mine, answers, strict=True)}

    def refused() -> str:
        """What every rank is told of a request that one of them brings and that is too long."""
        too_long = SamplingSettings(max_new_tokens=58)
        requests = [GenerationRequest(token_ids=prompts[0], seed=0, sampling=too_long)]
        try:
            engine.generate(requests if context.tp_rank == 0 else [])
        except UserError as error:
            return str(error)
        return "nothing"

    before = training_logits(chunk)
    free = SamplingSettings(max_new_tokens=arguments.new, temperature=0.7, ignore_eos=True)
    greedy = dataclasses.replace(free, temperature=0.0)
    found: dict[str, Any] = {
        "greedy": ask(greedy, [0, 1, 2, 3, 4]),
        "sampled": ask(free, list(range(10))),
        "sampled_in_another_order": ask(free, [7, 3, 9, 0, 5, 1, 8, 2, 6, 4]),
        "sampled_in_a_smaller_batch": ask(free, [8, 4]),
        "top_k": ask(dataclasses.replace(free, top_k=1), [0, 1, 2, 3, 4]),
        "one_rank_asks_nothing": ask(greedy, [0]),
    }
    found["refused"] = refused()
    found["unchanged"] = chunk.training and torch.equal(before, training_logits(chunk))
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.mul_(1.25)
    names = {name for name, _ in export_hf([chunk], spec)}
    engine.update_weights(export_hf([chunk], spec), expected_names=names, version=7)
    found["version"] = engine.weight_version
    found["greedy_after_a_change"] = ask(greedy, [0, 1, 2, 3, 4])
    return found


def training_logits(chunk: torch.nn.Module) -> torch.Tensor:
    """[1, 44, V / TP] of two packed sequences, through the attention that trains."""
    packed = pack([ids[:22] for ids in sequences()[2:4]])
    logits: torch.Tensor = chunk(
        input_ids=packed.tokens,
        position_ids=packed.position_ids,
        attention_mask=None,
        packed_seq_params=packed_seq_params(packed),
    )
    return logits.detach()


if __name__ == "__main__":
    main()
