"""What a reward model minimises: the Bradley-Terry loss of pairs of answers, pair by pair.

Legend: P pairs of a micro-batch; scores are float32, the loss is in nats and minimised.

As in `losses`, nothing is averaged here: the mean over all pairs of all ranks is the sum of these
numbers, divided once by the number of pairs. Left out: label smoothing, and ties.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, center_coef: float = 0.0
) -> Tensor:
    """Loss of each pair: -log sigmoid(chosen - rejected - margin), and a pull of scores to 0.

    Ouyang 2022 (arXiv 2203.02155), eq. 1, for K = 2: the probability that the chosen answer is the
    better one is sigmoid of the difference (Bradley and Terry 1952). The margin is Touvron 2023's
    (arXiv 2307.09288, eq. 2). Only differences count in it, so scores may drift; centring adds
    center_coef * (chosen + rejected)^2 (Eisenstein 2023, arXiv 2312.09244, section 2).

    Args:
        chosen: [P], scores of the better answers; carries the gradient.
        rejected: [P], of the worse ones.
        margins: [P], by how much the better one must lead; None for 0.
        center_coef: weight of the centring, 0 or more.

    Returns:
        [P] float32.

    Raises:
        ValueError: `center_coef` is negative.
    """
    if center_coef < 0:
        raise ValueError(f"center_coef must be 0 or more, got {center_coef}")
    lead = chosen - rejected
    loss = -F.logsigmoid(lead if margins is None else lead - margins)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss
