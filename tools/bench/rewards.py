"""What rewards cost: microseconds a response for rules, milliseconds for those with processes.

    python tools/bench/rewards.py                             # on made-up sums
    python tools/bench/rewards.py --gsm8k data/test.jsonl     # gsm8k on published answers too

Each figure is the best of several passes over the same responses in one thread, without start-up.
Left out: what waits in a step, which `timing_s/score` and `reward/overlap` of a run say.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megappo.config.rewards import CodeRewardSection, CustomRewardSection
from megappo.rewards import code, custom, gsm8k, math
from megappo.rewards.math_pool import MathVerifier

PASSES = 3
FUNCTION = (
    "def compute_score(solution_str, ground_truth):\n    return solution_str == ground_truth\n"
)


def best(work: Callable[[], object], count: int) -> float:
    """Seconds for one of `count`."""
    times = []
    for _ in range(PASSES):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times) / count


def of_gsm8k(answers: Sequence[str]) -> dict[str, float]:
    """Microseconds an answer, scored against itself."""
    truths = [answer.split(gsm8k.MARKER)[1].strip() for answer in answers]
    pairs = list(zip(answers, truths, strict=True))
    return {
        f"gsm8k {method}, us": 1e6
        * best(lambda m=method: [gsm8k.score(a, t, method=m) for a, t in pairs], len(pairs))
        for method in gsm8k.METHODS
    }


def of_processes() -> dict[str, float]:
    """Milliseconds a call of what runs in worker processes."""
    verifier = MathVerifier(timeout_s=math.TIMEOUT_S, num_workers=1)
    verifier.equal("x+1", "1+x")
    found = {"math, algebra, ms": 1e3 * best(lambda: verifier.equal("2x+x", "3x"), 1)}
    verifier.close()
    run = code.make(CodeRewardSection(), num_workers=1)
    program = "```python\nprint(2 * int(input()))\n```"
    tests = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    assert run(program, tests, {}) == 1.0
    found["code, a test, ms"] = 1e3 * best(lambda: run(program, tests, {}), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "own.py")
        path.write_text(FUNCTION)
        own = custom.make(CustomRewardSection(path=str(path)), num_workers=1)
        assert callable(own)
        info = {"data_source": "mine"}
        found["custom, a call, ms"] = 1e3 * best(
            lambda: [own("1", "1", info) for _ in range(100)], 100
        )
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, nargs="*", default=[], help="published JSON lines")
    arguments = parser.parse_args()
    made_up = [f"{n} and {2 * n} are\n#### {3 * n:,}" for n in range(1000)]
    tables = {"made-up sums": of_gsm8k(made_up)}
    for path in arguments.gsm8k:
        answers = [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]
        tables[f"{path.name}, {len(answers)} rows"] = of_gsm8k(answers)
    tables["processes"] = of_processes()
    for name, table in tables.items():
        print(name)
        for what, figure in table.items():
            print(f"  {what:<24} {figure:10.2f}")


if __name__ == "__main__":
    main()
