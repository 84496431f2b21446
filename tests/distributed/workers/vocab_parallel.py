"""Two ranks hold halves of a padded vocabulary; each saves its values and gradients."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.distributed.vocab_parallel import log_probs_and_entropy


def main() -> None:
    dist.init_process_group("gloo")
    case = torch.load(Path(sys.argv[1]) / "case.pt")
    shard = case["logits"].chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].clone()
    shard.requires_grad_()
    # A product by one, so that the function may overwrite its input.
    log_probs, entropy = log_probs_and_entropy(
        shard * 1.0,
        case["targets"],
        tp_group=dist.group.WORLD,
        vocab_size=case["vocab_size"],
        temperature=case["temperature"],
        chunk_tokens=5,
        with_entropy=True,
    )
    (log_probs * case["weights"] + entropy * case["weights"].flip(0)).sum().backward()
    result = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": shard.grad}
    torch.save(result, Path(sys.argv[1]) / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
