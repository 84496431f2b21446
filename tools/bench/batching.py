"""How well the plans of a step fill ranks and forward passes, on made-up lengths. CPU, seconds.

    python tools/bench/batching.py                            # a table in Markdown
    python tools/bench/batching.py --json                     # the same as JSON
    python tools/bench/batching.py --gsm8k data/train.jsonl   # also with GSM8K's own lengths

What is planned is what a run plans, by the same functions: samples are dealt out to data-parallel
ranks by cost (`megappo.trainer.balance`), packed into micro-batches under a token budget
(`megappo.data.batching`) and laid out for TP and CP (`megappo.models.packing`). The cost is that of
Qwen2.5-7B.

    ratio    largest / mean cost of the DP ranks, worst mini-batch; before and after the move
    floor    the least ratio that equal counts allow: the longest sample next to the cheapest others
    moved    samples that change rank / all
    waste    forwarded positions without a real token / all forwarded positions: padding of
             sequences to 2 CP, of rows to the layout's multiple, and empty micro-batches
    fill     real tokens / (micro-batches x budget); what is missing costs launches, not arithmetic
    least    micro-batches that the fullest rank's tokens need, whatever the plan
    ms       CPU time of planning a step on a rank: dealing out, and packing on the slowest rank

Left out: the time of the forward passes themselves, and of the exchange.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megappo.data.batching import plan_micro_batches
from megappo.data.cost import SequenceCost
from megappo.errors import DataError, UserError
from megappo.models.packing import Alignment, pack
from megappo.models.spec import spec_from_config
from megappo.trainer.balance import plan_batch, plan_metrics

QWEN2_5_7B = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SIBLINGS = 8
"""Responses a prompt. They stand next to each other, so a rank starts with whole families."""
SIBLING_CORRELATION = 0.5
"""Of the logarithms of two siblings' response lengths: a hard question has long answers."""
MINI_BATCHES = 2
"""Optimizer steps a batch."""
TEMPLATE_TOKENS = 53
"""Chat template and instruction around a question: GSM8K as `megappo data gsm8k` writes it."""
TOKENS_PER_WORD = {"question": 1.34, "answer": 2.41}
"""Of GSM8K's training set in SmolLM2's tokenizer; answers hold calculations without spaces."""

Draw = Callable[[np.random.Generator, int], list[int]]
"""(random numbers, prompts) -> prompt and response tokens of each sample, siblings together."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    lengths: str
    dp: int
    tp: int
    """with sequence parallelism"""
    cp: int
    samples: int
    """of a mini-batch on one DP rank"""
    budget: int
    """tokens of one micro-batch on one DP rank"""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measures of one case, as in the header; all but the times are the same in every run."""

    cost_ratio_before: float
    cost_ratio_after: float
    cost_ratio_floor: float
    moved_share: float
    waste: float
    fill: float
    micro_batches: float
    """a mini-batch"""
    least_micro_batches: float
    """that the tokens of the fullest rank need"""
    balance_ms: float
    packing_ms: float


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Positions of one mini-batch, summed over DP ranks."""

    real_tokens: int
    positions: int
    micro_batches: int
    """on each rank"""
    least_micro_batches: int
    slowest_s: float


CASES = [
    Case(lengths=lengths, dp=dp, tp=tp, cp=cp, samples=samples, budget=budget)
    for lengths, budget in (("gsm8k-like", 8192), ("heavy-tailed", 24576))
    for dp, samples in ((8, 128), (64, 32))
    for tp, cp in ((1, 1), (8, 1), (4, 2), (2, 4))
]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Log-normal lengths of prompts or responses."""

    mean: float
    """of the logarithm, as is `deviation`"""
    deviation: float
    largest: int
    added: int = 0
    """tokens on top of every length"""

    def tokens(self, z: np.ndarray) -> np.ndarray:
        """Lengths for standard normal numbers."""
        lengths = np.exp(self.mean + self.deviation * z).round().clip(1, self.largest)
        return lengths.astype(int) + self.added


def log_normal(prompt: Part, response: Part) -> Draw:
    """Prompts, and responses of which siblings are alike."""
    shared_part, own_part = math.sqrt(SIBLING_CORRELATION), math.sqrt(1 - SIBLING_CORRELATION)

    def draw(random: np.random.Generator, num_prompts: int) -> list[int]:
        prompts = prompt.tokens(random.standard_normal((num_prompts, 1)))
        shared = random.standard_normal((num_prompts, 1))
        own = random.standard_normal((num_prompts, SIBLINGS))
        responses = response.tokens(shared_part * shared + own_part * own)
        return (prompts + responses).flatten().tolist()

    return draw


def gsm8k_file(path: Path) -> Draw:
    """Rows of GSM8K's own file by number of words; every sibling is as long as the one answer.

    Raises:
        DataError: the file is missing.
    """
    if not path.is_file():
        raise DataError(f"--gsm8k needs a file of GSM8K, and {path} is none; give its .jsonl file")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    totals = np.array([TEMPLATE_TOKENS + _tokens(row) for row in rows])

    def draw(random: np.random.Generator, num_prompts: int) -> list[int]:
        return np.repeat(random.choice(totals, num_prompts), SIBLINGS).tolist()

    return draw


def _tokens(row: Mapping[str, str]) -> int:
    return round(sum(len(row[key].split()) * rate for key, rate in TOKENS_PER_WORD.items()))


DISTRIBUTIONS: dict[str, Draw] = {
    # Fitted to GSM8K's training set in SmolLM2's tokenizer: 113 and 126 tokens on average.
    "gsm8k-like": log_normal(
        Part(mean=4.04, deviation=0.345, largest=512, added=TEMPLATE_TOKENS),
        Part(mean=4.75, deviation=0.417, largest=1024),
    ),
    # Responses of median 600, and 1.4 % cut at the limit.
    "heavy-tailed": log_normal(
        Part(mean=4.5, deviation=0.5, largest=1024, added=TEMPLATE_TOKENS),
        Part(mean=6.4, deviation=1.5, largest=16384),
    ),
}


def measure(case: Case, draw: Draw, *, seed: int = 0) -> Result:
    """Plans one step, as its ranks would."""
    cost = SequenceCost.of_model(spec_from_config(QWEN2_5_7B))
    per_mini = case.dp * case.samples
    assert per_mini % SIBLINGS == 0, f"{per_mini} samples are no families of {SIBLINGS}"
    random = np.random.default_rng(seed)
    minis = [draw(random, per_mini // SIBLINGS) for _ in range(MINI_BATCHES)]
    totals = [
        [n for mini in minis for n in mini[rank * case.samples : (rank + 1) * case.samples]]
        for rank in range(case.dp)
    ]
    start = time.process_time()
    plan = plan_batch(totals, samples_per_mini_batch=case.samples, cost=cost)
    balance_s = time.process_time() - start
    metrics = plan_metrics(plan, totals, samples_per_mini_batch=case.samples, cost=cost)
    packings = [
        pack_mini_batch([[mini[number] for number in part] for part in parts], case)
        for mini, parts in zip(minis, plan, strict=True)
    ]
    real = sum(p.real_tokens for p in packings)
    micro_batches = sum(p.micro_batches for p in packings)
    return Result(
        cost_ratio_before=metrics["balance/cost_ratio_before"],
        cost_ratio_after=metrics["balance/cost_ratio_after"],
        cost_ratio_floor=max(ratio_floor(mini, case, cost) for mini in minis),
        moved_share=metrics["balance/moved_share"],
        waste=1 - real / sum(p.positions for p in packings),
        fill=real / (micro_batches * case.dp * case.budget),
        micro_batches=micro_batches / MINI_BATCHES,
        least_micro_batches=sum(p.least_micro_batches for p in packings) / MINI_BATCHES,
        balance_ms=1000 * balance_s,
        packing_ms=1000 * sum(p.slowest_s for p in packings),
    )


def pack_mini_batch(ranks: Sequence[Sequence[int]], case: Case) -> Packing:
    """Packs the lengths of every DP rank into equally many micro-batches.

    As in a run: each rank plans alone, the largest number is agreed on, each plans again with it.
    """
    align = Alignment(multiple_of=case.tp, cp=case.cp)
    padded = [[align.padded(n) for n in lengths] for lengths in ranks]
    alone, times = [], [0.0] * len(ranks)
    for rank, lengths in enumerate(padded):
        start = time.process_time()
        alone.append(len(plan_micro_batches(lengths, max_tokens=case.budget)))
        times[rank] += time.process_time() - start
    count, positions = max(alone), 0
    for rank, lengths in enumerate(padded):
        start = time.process_time()
        plan = plan_micro_batches(lengths, max_tokens=case.budget, num_micro_batches=count)
        times[rank] += time.process_time() - start
        positions += sum(
            sum(pack([[0] * ranks[rank][i] for i in part], align).lengths) for part in plan
        )
    return Packing(
        real_tokens=sum(sum(lengths) for lengths in ranks),
        positions=positions,
        micro_batches=count,
        least_micro_batches=max(math.ceil(sum(lengths) / case.budget) for lengths in padded),
        slowest_s=max(times),
    )


def ratio_floor(lengths: Sequence[int], case: Case, cost: Callable[[int], float]) -> float:
    """No deal of equal counts has a smaller largest / mean cost than this."""
    costs = sorted(cost(n) for n in lengths)
    mean = sum(costs) / case.dp
    return max(mean, costs[-1] + sum(costs[: case.samples - 1])) / mean


def table(results: Sequence[tuple[Case, Result]]) -> str:
    """In Markdown."""
    head = (
        "lengths | DP | TP | CP | samples a rank | budget | ratio before | after | floor | moved "
        "| waste | fill | micro-batches | least | deal ms | pack ms"
    )
    lines = [f"| {head} |", "|---" + "|---:" * head.count("|") + "|"]
    for c, r in results:
        lines.append(
            f"| {c.lengths} | {c.dp} | {c.tp} | {c.cp} | {c.samples} | {c.budget} "
            f"| {r.cost_ratio_before:.3f} | {r.cost_ratio_after:.4f} | {r.cost_ratio_floor:.4f} "
            f"| {r.moved_share:.0%} | {r.waste:.2%} | {r.fill:.1%} | {r.micro_batches:g} "
            f"| {r.least_micro_batches:g} | {r.balance_ms:.0f} | {r.packing_ms:.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all cases; 2 on a bad argument."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="a list of objects, one a case")
    parser.add_argument("--gsm8k", type=Path, help="a .jsonl file of GSM8K: adds its own lengths")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    options = parser.parse_args(arguments)
    try:
        draws, cases = dict(DISTRIBUTIONS), list(CASES)
        if options.gsm8k is not None:
            draws["gsm8k"] = gsm8k_file(options.gsm8k)
            cases += [
                Case(**asdict(c) | {"lengths": "gsm8k"}) for c in CASES if c.lengths == "gsm8k-like"
            ]
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    results = [(case, measure(case, draws[case.lengths], seed=options.seed)) for case in cases]
    if options.json:
        print(json.dumps([asdict(case) | asdict(result) for case, result in results], indent=1))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
