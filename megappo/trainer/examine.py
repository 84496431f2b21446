"""A few samples of each data_source in words, for the screen: what is the policy rewarded for?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from megappo.types import RolloutBatch


def examples(batch: RolloutBatch, tokenizer: Any, count: int) -> Iterator[str]:
    """The first `count` samples of each data_source, of one rank's samples.

    Args:
        batch: with scores, and with texts: not after samples moved between ranks.
        tokenizer: of the policy.
        count: 0 for none.
    """
    assert batch.scores is not None
    shown: Counter[str] = Counter()
    scores, scored = batch.scores.tolist(), batch.is_scored.tolist()
    for prompt, completion, score, counts in zip(
        batch.prompts, batch.completions, scores, scored, strict=True
    ):
        if shown[prompt.data_source] >= count:
            continue
        shown[prompt.data_source] += 1
        said = f"score {score:g}" if counts else "no score, as its reward failed"
        yield (
            f"sample     row {prompt.row}, data_source {prompt.data_source}, {said}, "
            f"{len(completion.token_ids)} tokens, ended by {completion.finish_reason}\n"
            f"  prompt        {tokenizer.decode(list(prompt.token_ids))!r}\n"
            f"  response      {completion.text!r}\n"
            f"  ground truth  {prompt.ground_truth!r}"
        )
