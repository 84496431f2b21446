import pytest
import torch

from megappo.types import Completion, Prompt, collate


def prompt(row):
    return Prompt(
        row=row, token_ids=(1, 2, row), data_source="d", ground_truth=str(row), extra_info={}
    )


def completion(*ids, reason="stop"):
    return Completion(
        token_ids=ids, log_probs=tuple(-0.1 * i for i in ids), finish_reason=reason, text=""
    )


def test_masks_come_from_lengths_and_not_from_token_values():
    batch = collate([prompt(0), prompt(1)], [completion(0, 0, 0), completion(7)])
    assert batch.responses.tolist() == [[0, 0, 0], [7, 0, 0]]
    assert batch.response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.rollout_log_probs[1].tolist() == pytest.approx([-0.7, 0.0, 0.0])
    assert batch.total_lengths == [6, 4]


def test_ids_and_log_probs_must_be_as_many():
    with pytest.raises(RuntimeError, match="2 token ids and 1 log-probs"):
        Completion(token_ids=(1, 2), log_probs=(0.0,), finish_reason="stop", text="")


def test_every_field_moves_with_one_permutation():
    batch = collate([prompt(i) for i in range(3)], [completion(i + 1) for i in range(3)])
    batch = batch.with_fields(scores=torch.tensor([0.0, 1.0, 2.0]))
    moved = batch.select([2, 0])
    assert [p.row for p in moved.prompts] == [2, 0]
    assert [c.token_ids for c in moved.completions] == [(3,), (1,)]
    assert moved.responses.tolist() == [[3], [1]]
    assert moved.scores.tolist() == [2.0, 0.0]
    assert moved.old_log_probs is None
