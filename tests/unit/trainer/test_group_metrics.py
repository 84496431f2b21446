import torch

from megappo.distributed.metrics import Tally
from megappo.trainer.group_metrics import GroupMetrics
from megappo.types import Completion, Prompt, collate


def batch_of(*samples):
    """One sample for each (row, source, token ids, score)."""
    prompts = [
        Prompt(row=row, token_ids=(1,), data_source=source, ground_truth="", extra_info={})
        for row, source, _, _ in samples
    ]
    completions = [
        Completion(token_ids=ids, log_probs=(-1.0,) * len(ids), finish_reason="stop", text="")
        for _, _, ids, _ in samples
    ]
    return collate(prompts, completions).with_fields(scores=torch.tensor([s[3] for s in samples]))


SAMPLES = batch_of(
    (0, "sums", (5,), 1.0),
    (0, "sums", (5,), 1.0),
    (1, "words", (5, 6), 0.0),
    (1, "words", (6, 5), 0.5),
)


def found(metrics, samples=SAMPLES):
    tally = Tally()
    metrics.add(samples, tally)
    return {name: total / count for name, (total, count) in tally.sums.items()}


def test_groups_and_sources_are_described():
    metrics = GroupMetrics(n=2, sources=("sums", "words", "unseen"))
    assert found(metrics) == {
        "rollout/group_diversity": 0.75,
        "rollout/zero_variance_groups": 0.5,
        "train/sums/score/mean": 1.0,
        "train/words/score/mean": 0.25,
    }
    assert set(found(metrics)) | {"train/unseen/score/mean"} == set(metrics.means)


def test_masked_samples_are_no_members_of_their_group():
    mask = SAMPLES.response_mask.clone()
    mask[2] = False  # the other one of its group has nobody to be compared with
    figures = found(GroupMetrics(n=2), SAMPLES.with_fields(response_mask=mask))
    assert figures["rollout/group_diversity"] == 0.75
    assert figures["rollout/zero_variance_groups"] == 1.0
    mask[3] = False
    figures = found(GroupMetrics(n=2), SAMPLES.with_fields(response_mask=mask))
    assert figures["rollout/group_diversity"] == 0.5  # of the group that has members
    assert figures["rollout/zero_variance_groups"] == 1.0


def test_a_sample_whose_reward_failed_is_no_member_and_has_no_score():
    assert SAMPLES.scores is not None
    failed = torch.tensor([False, False, True, False])
    samples = SAMPLES.with_scores(SAMPLES.scores, failed)
    assert samples.response_mask.any(dim=-1).tolist() == [True, True, False, True]
    assert samples.is_scored.tolist() == [True, True, False, True]
    figures = found(GroupMetrics(n=2, sources=("sums", "words")), samples)
    assert figures["train/words/score/mean"] == 0.5
    assert figures["rollout/zero_variance_groups"] == 1.0


def test_groups_of_one_have_no_figures_and_one_rank_alone_reports():
    assert set(found(GroupMetrics(n=1, sources=("sums", "words")))) == {
        "train/sums/score/mean",
        "train/words/score/mean",
    }
    assert found(GroupMetrics(n=2, reports=False)) == {}
