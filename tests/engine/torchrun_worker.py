"""One torchrun rank with gloo and an engine: generates and pushes between collectives.

Usage: torchrun --nproc-per-node 2 torchrun_worker.py MODEL FOLDER. Writes FOLDER/rank_R.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import settings_for
from safetensors.torch import load_file

from megappo.rollout.engine import GenerationRequest
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_engine import SGLangEngine


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = load_file(model / "model.safetensors")
    sampling = SamplingSettings(max_new_tokens=8, ignore_eos=True)
    requests = [
        GenerationRequest(token_ids=(40, 50 + i), seed=i, sampling=sampling) for i in range(8)
    ]
    settings = settings_for(model, folder / f"engine_{rank}.log", local_rank=rank)
    answers, sums = [], []
    with SGLangEngine(settings) as engine:
        for step in range(2):
            answers.append([c.token_ids for c in engine.generate(requests)])
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            sums.append(total.item())
            engine.update_weights(weights.items(), expected_names=set(weights), version=step + 1)
    dist.barrier()
    facts = {"answers": answers, "sums": sums, "rank_variable": os.environ["RANK"]}
    (folder / f"rank_{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
