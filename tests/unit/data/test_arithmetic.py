"""Seeded word problems: right answers, splits that share nothing, one seed one set of bytes."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megappo.data.arithmetic import (
    PEOPLE,
    TEMPLATES,
    THINGS,
    Problem,
    sample_problems,
    write_dataset,
)
from megappo.errors import DataError
from megappo.rewards import gsm8k

# 24 people x 16 things = 384 pairs, of which (i + j) % 8 == 0 holds out 24 * 2 = 48.
# 3 templates x 81 sums + 3 templates x 36 differences = 351 forms.
NUM_VAL = 48 * 351
NUM_TRAIN = 336 * 351


def answer_of_text(question: str) -> int:
    """An independent reader: two numbers, and the words that tell a difference."""
    a, b = (int(n) for n in re.findall(r"\d+", question))
    return a - b if re.search(r"\bleft\?|\bmissing\?", question) else a + b


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_answer_is_that_of_its_question(split: str) -> None:
    problems = sample_problems(split, seed=1, count=NUM_VAL)
    assert [p.answer for p in problems] == [answer_of_text(p.question) for p in problems]
    assert {p.answer for p in problems} == set(range(1, 19))
    assert {p.template for p in problems} == set(range(6))


def test_a_sum_and_a_difference_worked_by_hand() -> None:
    by_question = {p.question: p for p in sample_problems("val", seed=0, count=NUM_VAL)}
    assert by_question["Ada has 9 apples and finds 9 more. How many apples?"] == Problem(
        question="Ada has 9 apples and finds 9 more. How many apples?", answer=18, template=0
    )
    assert by_question["Ada needs 9 nuts but has 8. How many are missing?"].answer == 1


def test_no_question_is_drawn_twice_and_the_splits_share_none() -> None:
    val = {p.question for p in sample_problems("val", seed=3, count=NUM_VAL)}
    train = {p.question for p in sample_problems("train", seed=4, count=NUM_TRAIN)}
    assert len(val) == NUM_VAL
    assert len(train) == NUM_TRAIN
    assert not val & train


def test_forms_are_drawn_evenly() -> None:
    problems = sample_problems("train", seed=0, count=35_100)
    counts = Counter((p.template, *re.findall(r"\d", p.question)) for p in problems)
    assert len(counts) == 351
    # Expected 100 each; a hypergeometric spread of 8.4, so 6 of them leave 50 to 150.
    assert 50 < min(counts.values()) <= max(counts.values()) < 150


def test_the_gold_response_alone_scores_one() -> None:
    for p in sample_problems("train", seed=0, count=200):
        assert p.gold_response == f"#### {p.answer}"
        assert gsm8k.score(p.gold_response, str(p.answer), method="strict") == 1.0
        assert gsm8k.score(f"#### {p.answer + 1}", str(p.answer), method="strict") == 0.0


def test_names_and_things_are_all_different() -> None:
    assert len(set(PEOPLE)) == 24
    assert len(set(THINGS)) == 16
    assert len(set(TEMPLATES)) == 6


def test_one_seed_writes_the_same_bytes_and_another_seed_other_rows(tmp_path: Path) -> None:
    first = write_dataset(tmp_path / "a", seed=7, num_train=300, num_val=40)
    again = write_dataset(tmp_path / "b" / "deep", seed=7, num_train=300, num_val=40)
    other = write_dataset(tmp_path / "c", seed=8, num_train=300, num_val=40)
    assert [p.name for p in first] == ["train.parquet", "val.parquet"]
    assert [digest(p) for p in first] == [digest(p) for p in again]
    assert pq.read_table(first[0]).to_pylist() != pq.read_table(other[0]).to_pylist()


def test_the_files_hold_the_columns_of_a_prompt_file(tmp_path: Path) -> None:
    train, val = write_dataset(tmp_path, seed=0, num_train=300, num_val=40)
    assert (pq.read_metadata(train).num_rows, pq.read_metadata(val).num_rows) == (300, 40)
    for row in pq.read_table(train).to_pylist():
        assert row == {
            "prompt": [{"role": "user", "content": row["question"]}],
            "data_source": "arithmetic",
            "ground_truth": str(answer_of_text(row["question"])),
            "question": row["question"],
            "template": row["template"],
        }


@pytest.mark.parametrize(("num_train", "num_val"), [(NUM_TRAIN + 1, 8), (8, NUM_VAL + 1), (8, 0)])
def test_asking_for_more_than_there_is_names_the_numbers_and_writes_nothing(
    tmp_path: Path, num_train: int, num_val: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"holds (16848|117936) different problems, but \d+ were"):
        write_dataset(out, seed=0, num_train=num_train, num_val=num_val)
    assert not out.exists()


def test_an_instruction_stands_behind_each_question(tmp_path):
    train, _ = write_dataset(
        tmp_path, seed=0, num_train=4, num_val=2, instruction="Answer with a number."
    )
    for row in pq.read_table(train).to_pylist():
        assert row["prompt"][0]["content"] == row["question"] + " Answer with a number."
