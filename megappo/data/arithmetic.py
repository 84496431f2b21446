"""Short arithmetic word problems, made from a seed: the data of the quickstart.

"Tom has 3 apples and finds 4 more. How many apples?" -> "#### 7". One sentence pattern, two small
numbers, an answer of one or two digits, so that a model of a million parameters can learn them on a
laptop. The rows have the columns of any prompt file and are scored by the `gsm8k` rule.

Training and validation never share a question, whatever their seeds: a person and a thing that meet
in validation never meet in training. The sums themselves are shared, as there are only 117 of them;
what validation measures is the sum found in a new sentence. Left out: division and multiplication,
more than one step, and distractors, which a model of this size would not learn in minutes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megappo.errors import DataError

DATA_SOURCE = "arithmetic"

PEOPLE = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo"),
    *("Mia", "Noor", "Otto", "Pia", "Quinn", "Rosa", "Sam", "Tom", "Uma", "Vera", "Will", "Zoe"),
)
THINGS = (
    *("apples", "books", "cards", "coins", "cups", "eggs", "keys", "maps"),
    *("nuts", "pears", "pens", "plums", "rings", "shells", "stones", "toys"),
)

_SUM_TEMPLATES = (
    "{person} has {a} {things} and finds {b} more. How many {things}?",
    "{person} sees {a} {things} here and {b} {things} there. How many in all?",
    "{person} buys {a} {things}, then {b} more. How many in all?",
)
_DIFFERENCE_TEMPLATES = (
    "{person} has {a} {things} and loses {b}. How many are left?",
    "{person} needs {a} {things} but has {b}. How many are missing?",
    "{person} had {a} {things}, then sold {b}. How many are left?",
)
TEMPLATES = _SUM_TEMPLATES + _DIFFERENCE_TEMPLATES

# (template, a, b) of every question, before it names a person and a thing.
_FORMS = (
    *((t, a, b) for t in range(3) for a in range(1, 10) for b in range(1, 10)),
    *((t, a, b) for t in range(3, 6) for a in range(2, 10) for b in range(1, a)),
)
_HELD_OUT_EVERY = 8

_SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("question", pa.string()),
        ("template", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its answer."""

    question: str
    answer: int
    """Between 1 and 18."""
    template: int
    """Index into `TEMPLATES`; the first three add, the others subtract."""

    @property
    def gold_response(self) -> str:
        """The shortest response that the `gsm8k` rule accepts."""
        return f"#### {self.answer}"


def sample_problems(split: str, *, seed: int, count: int) -> list[Problem]:
    """Different problems of one split; each is as likely as any other, in an order the seed fixes.

    Args:
        split: `train` or `val`. No question of one is a question of the other, for any two seeds.
        seed: Same seed, same problems.
        count: How many.

    Raises:
        DataError: The split has fewer than `count` different problems.
    """
    pairs = _pairs(held_out=split == "val")
    available = len(pairs) * len(_FORMS)
    if not 0 < count <= available:
        raise DataError(
            f"the {split} split of the arithmetic data holds {available} different problems, but "
            f"{count} were asked for; ask for a number between 1 and {available}"
        )
    chosen = random.Random(f"{split}/{seed}").sample(range(available), count)
    return [_render(*pairs[i // len(_FORMS)], *_FORMS[i % len(_FORMS)]) for i in chosen]


def write_dataset(
    out_dir: Path, *, seed: int, num_train: int, num_val: int, instruction: str = ""
) -> tuple[Path, Path]:
    """Writes `train.parquet` and `val.parquet`; the same seed gives the same bytes.

    Columns: `prompt` (one user message), `data_source`, `ground_truth` (the number as a string),
    and for people `question` and `template`.

    Args:
        out_dir: Made if missing; files of these names are replaced.
        seed: Of both splits.
        num_train: Rows of the training file.
        num_val: Rows of the validation file.
        instruction: Put behind each question, after a space, for models that need to be told how
            to answer.

    Returns:
        The paths of the two files.

    Raises:
        DataError: A split has fewer different problems than asked for; nothing is written then.
    """
    tables = {
        "train": _table(sample_problems("train", seed=seed, count=num_train), instruction),
        "val": _table(sample_problems("val", seed=seed, count=num_val), instruction),
    }
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    paths = {split: out_dir / f"{split}.parquet" for split in tables}
    for split, table in tables.items():
        pq.write_table(table, paths[split])
    return paths["train"], paths["val"]


def _pairs(*, held_out: bool) -> list[tuple[str, str]]:
    """(person, thing) pairs of validation, an eighth of all, or those of training."""
    return [
        (person, thing)
        for i, person in enumerate(PEOPLE)
        for j, thing in enumerate(THINGS)
        if ((i + j) % _HELD_OUT_EVERY == 0) == held_out
    ]


def _render(person: str, things: str, template: int, a: int, b: int) -> Problem:
    question = TEMPLATES[template].format(person=person, things=things, a=a, b=b)
    answer = a + b if template < len(_SUM_TEMPLATES) else a - b
    return Problem(question=question, answer=answer, template=template)


def _table(problems: list[Problem], instruction: str) -> pa.Table:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{p.question} {instruction}".rstrip()}],
            "data_source": DATA_SOURCE,
            "ground_truth": str(p.answer),
            "question": p.question,
            "template": p.template,
        }
        for p in problems
    ]
    return pa.Table.from_pylist(rows, schema=_SCHEMA)
