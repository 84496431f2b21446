import torch

from megappo.trainer.examine import examples
from megappo.types import Completion, Prompt, collate


class Letters:
    """Decodes 0 as a, 1 as b."""

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


def test_the_first_samples_of_each_source_are_shown_with_their_scores():
    prompts = [
        Prompt(row=n, token_ids=(n,), data_source=source, ground_truth=f"t{n}", extra_info={})
        for n, source in enumerate(["sums", "sums", "words", "sums"])
    ]
    answers = [
        Completion(token_ids=(5, 6), log_probs=(0.0, 0.0), finish_reason="stop", text=f"r{n}\n")
        for n in range(4)
    ]
    batch = collate(prompts, answers).with_fields(scores=torch.tensor([1.0, 0.0, -0.25, 1.0]))
    first, second = examples(batch, Letters(), 1)
    assert first.splitlines() == [
        "sample     row 0, data_source sums, score 1, 2 tokens, ended by stop",
        "  prompt        'a'",
        "  response      'r0\\n'",
        "  ground truth  't0'",
    ]
    assert "row 2, data_source words, score -0.25" in second
    assert list(examples(batch, Letters(), 0)) == []
    failed = batch.with_scores(batch.scores, torch.tensor([True, False, False, False]))
    assert "data_source sums, no score, as its reward failed" in next(
        examples(failed, Letters(), 1)
    )
    assert len(list(examples(batch, Letters(), 2))) == 3
