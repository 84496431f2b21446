"""Pairs of a right and a wrong answer to the arithmetic word problems, made from a seed.

The data of `tools/rlhf_demo.sh` and of tests: real files of the form that `megappo train-rm` and
`megappo train-sft` read. Left out: pairs by people, which no seed makes.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.data.arithmetic import Problem, sample_problems

ROWS_A_GROUP = 512
"""Small groups, so that several ranks find some to read."""

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_SCHEMA = pa.schema([("prompt", _MESSAGES), ("chosen", pa.string()), ("rejected", pa.string())])


def write_preferences(
    out_dir: Path, *, seed: int, num_train: int, num_val: int
) -> tuple[Path, Path]:
    """Writes `train.parquet` and `val.parquet`; the same seed gives the same bytes.

    Columns: `prompt` (one user message), `chosen` ("#### 7") and `rejected` ("#### 8"): half of the
    wrong answers are one too large, as a model that miscounts gives them, the others any number
    from 0 to 19.

    Args:
        out_dir: Made if missing; files of these names are replaced.
        seed: Of questions and wrong answers.
        num_train: Rows of the training file.
        num_val: Rows of the validation file.

    Raises:
        DataError: there are fewer different problems than asked for; nothing is written then.
    """
    tables = {
        split: _table(sample_problems(split, seed=seed, count=count), f"{split}/{seed}/wrong")
        for split, count in (("train", num_train), ("val", num_val))
    }
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = {split: out_dir / f"{split}.parquet" for split in tables}
    for split, table in tables.items():
        pq.write_table(table, paths[split], row_group_size=ROWS_A_GROUP)
    return paths["train"], paths["val"]


def _table(problems: list[Problem], seed: str) -> pa.Table:
    draw = random.Random(seed)
    rows = [
        {
            "prompt": [{"role": "user", "content": problem.question}],
            "chosen": problem.gold_response,
            "rejected": f"#### {_wrong(problem.answer, draw)}",
        }
        for problem in problems
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


def _wrong(answer: int, draw: random.Random) -> int:
    if draw.random() < 0.5:
        return answer + 1
    return draw.choice([n for n in range(20) if n != answer])
