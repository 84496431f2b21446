import math
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest
import torch

from megappo.rollout.sglang_attention import padded_decode
from megappo.rollout.sglang_min_p import _draw_above_min_p
from megappo.rollout.sglang_seeds import draw_tokens, uniform_noise

MASK = 2**64 - 1


def mix_by_hand(x: int) -> int:
    """splitmix64's finaliser on Python integers."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_noise_equals_integer_arithmetic_by_hand():
    seeds, positions = [0, 1, 2**63 - 1, 123456789012345], [0, 5, 4095, 17]
    noise = uniform_noise(torch.tensor(seeds), torch.tensor(positions), 6)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        key = mix_by_hand(seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03)
        for token in range(6):
            bits = mix_by_hand(key + token * 0xABC98388FB8FAC03)
            assert noise[row, token].item() == ((bits >> 11) + 0.5) * 2.0**-53


def test_draws_follow_the_distribution():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    n = 20_000
    seeds = torch.arange(n, dtype=torch.int64) * 65536
    drawn = draw_tokens(p.log().expand(n, -1), seeds, torch.full((n,), 9))
    share = torch.bincount(drawn[:, 0], minlength=5).double() / n
    # Four standard errors of the largest share.
    assert (share - p).abs().max().item() < 4 * math.sqrt(0.25 / n)
    assert share[4].item() == 0.0


def test_siblings_with_consecutive_seeds_draw_independently():
    n = 20_000
    seeds = torch.arange(n, dtype=torch.int64)
    noise = uniform_noise(seeds, torch.zeros(n, dtype=torch.int64), 4)
    correlation = torch.corrcoef(torch.cat([noise[:-1].T, noise[1:].T]))
    assert (correlation - torch.eye(8)).abs().max().item() < 4 / math.sqrt(n)


def test_a_draw_does_not_depend_on_the_rows_around_it():
    logits = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(7) * 1000, torch.arange(7) + 3
    together = draw_tokens(logits, seeds, positions)
    for row in (6, 2):
        alone = draw_tokens(logits[row, None], seeds[row, None], positions[row, None])
        assert alone.item() == together[row].item()


def test_extreme_logits_draw_the_only_possible_token():
    logits = torch.full((3, 50), -math.inf)
    logits[:, 31] = -1e4
    drawn = draw_tokens(logits, torch.tensor([0, 2**62, 5]), torch.tensor([0, 1, 10**6]))
    assert drawn[:, 0].tolist() == [31, 31, 31]


def test_min_p_with_seeds_draws_from_tokens_that_all_three_rules_keep(monkeypatch):
    """p = .4, .3, .15, .1, .05 in each row, and what the row's settings leave of it."""
    from sglang.srt.layers import sampler

    monkeypatch.setattr(sampler, "multinomial_with_seed", draw_tokens)
    rows = [  # top_k, top_p, min_p, kept
        (5, 1.0, 0.0, {4, 2, 0, 1, 3}),
        (5, 1.0, 0.3, {4, 2, 0}),  # 0.15 >= 0.3 x 0.4
        (5, 1.0, 0.5, {4, 2}),
        (2, 1.0, 0.3, {4, 2}),
        (5, 0.6, 0.2, {4, 2}),  # 0.4 + 0.3 is over 0.6 of the whole, what min_p leaves out counted
        (5, 0.75, 0.2, {4, 2, 0}),
        (5, 0.75, 0.9, {4}),
    ]
    n = 400
    p = torch.tensor([0.15, 0.1, 0.3, 0.05, 0.4])
    settings = torch.tensor([row[:3] for row in rows]).repeat_interleave(n, dim=0)
    drawn = _draw_above_min_p(
        sampler.top_k_top_p_min_p_sampling_from_probs_torch,
        p.repeat(n * len(rows), 1),
        settings[:, 0].int(),
        settings[:, 1],
        settings[:, 2],
        True,
        torch.arange(n).repeat(len(rows)),
        torch.full((n * len(rows),), 7),
    ).view(len(rows), n)
    for tokens, (*_, kept) in zip(drawn, rows, strict=True):
        counts = torch.bincount(tokens, minlength=5).double()
        assert set(counts.nonzero()[:, 0].tolist()) == kept
        share = torch.zeros(5).double()
        share[list(kept)] = p[list(kept)].double() / p[list(kept)].sum()
        # Four standard errors of the largest share.
        assert (counts / n - share).abs().max().item() < 4 * math.sqrt(0.25 / n)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_padded_decode_equals_attention_written_out(heads: int, groups: int):
    generator = torch.Generator().manual_seed(1)
    lengths, dim, scaling = torch.tensor([1, 7, 4]), 8, 0.3
    keys, values = torch.randn(2, 40, groups, dim, generator=generator)
    query = torch.randn(3, heads, dim, generator=generator)
    slots = torch.randperm(39, generator=generator)[: 3 * 9].view(3, 9) + 1
    got = padded_decode(
        query,
        keys,
        values,
        token_slots=slots,
        lengths=lengths,
        scaling=scaling,
        enable_gqa=heads != groups,
    )
    for row in range(3):
        own = slots[row, : lengths[row]]
        for head in range(heads):
            group = head * groups // heads
            scores = (keys[own, group] @ query[row, head]) * scaling
            expected = scores.softmax(0) @ values[own, group]
            torch.testing.assert_close(got[row, head], expected, atol=1e-6, rtol=1e-6)


def test_sglang_can_find_both_plugins():
    names = {
        entry.name: entry.value
        for group in ("sglang.srt.platforms", "sglang.srt.plugins")
        for entry in entry_points(group=group)
    }
    assert names["megappo_cpu"] == "megappo.rollout.sglang_platform:activate"
    assert names["megappo_seeds"] == "megappo.rollout.sglang_seeds:register"


@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_process_ends_with_a_killed_parent_even_if_that_is_gone_before_it_asks(tmp_path, moment):
    worker = Path(__file__).parent / "orphan_worker.py"
    parent = subprocess.run([sys.executable, worker, tmp_path, moment], timeout=120, check=False)
    assert parent.returncode == -9
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)
    assert not (tmp_path / "survived").exists()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
