"""Preference rows: forms of cells, filters, shares of ranks, and errors that name the place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.data.examples import Columns, ExampleDataset, as_samples, split_answer
from megappo.data.preferences import write_preferences
from megappo.errors import DataError
from tests.tiny_run import make_tokenizer

PAIRS = Columns(prompt="prompt", answers=("chosen", "rejected"))
ASKED = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def says(text):
    return [{"role": "assistant", "content": text}]


def dataset(folder, tokenizer, rows, *, columns=PAIRS, max_length=64, too_long="drop", group=2):
    path = folder / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return ExampleDataset(
        [path], tokenizer, columns=columns, max_length=max_length, too_long=too_long
    )


def scanned(*args, ranks=1, **kwargs):
    made = dataset(*args, **kwargs)
    made.use([made.scan(rank=r, world_size=ranks) for r in range(ranks)])
    return made


FORMS = {
    "text answers": {"prompt": ASKED, "chosen": "4", "rejected": "5"},
    "messages": {"prompt": ASKED, "chosen": says("4"), "rejected": says("5")},
    "whole conversations": {
        "prompt": ASKED, "chosen": ASKED + says("4"), "rejected": ASKED + says("5")
    },
    "conversations and a text prompt": {
        "prompt": "2+2?", "chosen": ASKED + says("4"), "rejected": ASKED + says("5")
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_gives_the_ids_of_a_rollout(tmp_path, tokenizer, form):
    (example,) = scanned(tmp_path, tokenizer, [FORMS[form]]).examples([0])
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(example.prompt) == text
    assert [tokenizer.decode(a) for a in example.answers] == ["4<|im_end|>", "5<|im_end|>"]
    assert example.lengths == [len(example.prompt) + 2] * 2


def test_a_prompt_of_text_is_taken_as_it_is(tmp_path, tokenizer):
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    (example,) = scanned(tmp_path, tokenizer, [row]).examples([0])
    assert tokenizer.decode(example.prompt) == "2+2="


def test_conversations_need_no_prompt_column(tmp_path, tokenizer):
    row = {"chosen": ASKED + says("4"), "rejected": ASKED + says("5")}
    columns = Columns(prompt="", answers=("chosen", "rejected"))
    (example,) = scanned(tmp_path, tokenizer, [row], columns=columns).examples([0])
    assert "2+2?" in tokenizer.decode(example.prompt)


def rows_of(count):
    return [{"prompt": "p", "chosen": "x" * (i + 1), "rejected": "y"} for i in range(count)]


def test_long_rows_and_equal_answers_are_left_out_and_counted(tmp_path, tokenizer):
    rows = rows_of(5)
    rows[1]["rejected"] = rows[1]["chosen"]
    made = scanned(tmp_path, tokenizer, rows, max_length=6)  # prompt 1, end 1: x up to 4
    assert made.found.rows == (0, 2, 3)
    assert (made.found.num_too_long, made.found.num_equal) == (1, 1)
    assert "3 of 5 train rows (1 over data.max_length, 1 with equal answers" in made.in_words


@pytest.mark.parametrize("group", [2, 9], ids=["of two rows", "all in one"])
def test_ranks_share_the_look_by_rows_and_find_what_one_finds(tmp_path, tokenizer, group):
    rows = rows_of(9)
    alone = scanned(tmp_path, tokenizer, rows, max_length=7, group=group)
    made = dataset(tmp_path, tokenizer, rows, max_length=7, group=group)
    parts = [made.scan(rank=r, world_size=4) for r in range(4)]  # rows 0-1, 2-3, 4-5, 6-8
    assert [part.rows for part in parts] == [(0, 1), (2, 3), (4,), ()]
    assert [part.num_too_long for part in parts] == [0, 0, 1, 3]
    made.use(parts)
    assert made.found == alone.found


def test_of_bad_rows_on_several_ranks_the_first_is_told(tmp_path, tokenizer):
    rows = rows_of(8)
    for bad in (3, 4):  # in different groups of two
        rows[bad]["rejected"] = None
    made = dataset(tmp_path, tokenizer, rows)
    with pytest.raises(DataError, match="train row 3 "):
        made.use([made.scan(rank=r, world_size=2) for r in range(2)])


def test_rows_of_many_groups_are_decoded_once_each_while_they_fit(tmp_path, tokenizer):
    made = scanned(tmp_path, tokenizer, rows_of(40))  # 20 groups
    for step in range(8):
        wanted = [(7 * i + step) % 40 for i in range(30)]
        assert [e.row for e in made.examples(wanted)] == wanted
    assert made.row_groups_read == 20


def test_only_the_row_groups_of_asked_rows_are_read(tmp_path, tokenizer):
    made = scanned(tmp_path, tokenizer, rows_of(8))
    assert [e.row for e in made.examples([7, 0, 6])] == [7, 0, 6]
    assert made.row_groups_read == 2


MISTAKES = {
    "empty answer cell": ({"chosen": None}, "column chosen.*answer must be text"),
    "answer by the user": ({"chosen": ASKED}, "column chosen.*role is 'user'"),
    "no prompt": ({"prompt": None}, "there is no prompt"),
    "another beginning": (
        {"prompt": "1+1?", "rejected": ASKED + says("5")}, "column rejected.*begins otherwise"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_row_that_cannot_be_used_is_named_with_file_row_and_column(tmp_path, tokenizer, name):
    change, message = MISTAKES[name]
    good = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    bad = {**good, **change}
    path = tmp_path / "pairs.parquet"
    made = dataset(tmp_path, tokenizer, [good, good])
    made.scan(rank=0, world_size=1)
    tables = [pa.Table.from_pylist([row]) for row in (good, bad)]
    pq.write_table(tables[0], tmp_path / "first.parquet")
    pq.write_table(tables[1], path)
    made = ExampleDataset(
        [tmp_path / "first.parquet", path], tokenizer,
        columns=PAIRS, max_length=64, too_long="drop",
    )  # fmt: skip
    with pytest.raises(DataError, match=rf"train row 1 \(.*pairs.parquet, its row 0\).*{message}"):
        made.use([made.scan(rank=0, world_size=1)])


def test_long_rows_may_stop_the_run(tmp_path, tokenizer):
    made = dataset(tmp_path, tokenizer, rows_of(5), max_length=6, too_long="error")
    with pytest.raises(DataError, match=r"row 4 .* have 7 tokens, more than data.max_length 6"):
        made.use([made.scan(rank=0, world_size=1)])


def test_no_row_left_and_a_missing_column_are_errors(tmp_path, tokenizer):
    made = dataset(tmp_path, tokenizer, rows_of(3), max_length=1)
    with pytest.raises(DataError, match="no row is left of 0 of 3 train rows"):
        made.use([made.scan(rank=0, world_size=1)])
    with pytest.raises(DataError, match="lacks the columns worse; found: prompt, chosen, rejected"):
        dataset(
            tmp_path, tokenizer, rows_of(1),
            columns=Columns(prompt="prompt", answers=("chosen", "worse")),
        )  # fmt: skip


def test_margins_are_numbers_and_travel_with_their_pairs(tmp_path, tokenizer):
    columns = Columns(prompt="prompt", answers=("chosen", "rejected"), margin="m")
    rows = [row | {"m": float(i)} for i, row in enumerate(rows_of(3))]
    made = scanned(tmp_path, tokenizer, rows, columns=columns)
    batch = as_samples(made.examples([2, 1]))
    assert [p.extra_info["margin"] for p in batch.prompts] == [2.0, 2.0, 1.0, 1.0]
    assert batch.response_lengths == [4, 2, 3, 2]
    rows[1]["m"] = float("nan")
    bad = dataset(tmp_path, tokenizer, rows, columns=columns)
    with pytest.raises(DataError, match=r"row 1 .*column m: a margin must be a number, not nan"):
        bad.use([bad.scan(rank=0, world_size=1)])


def test_a_conversation_splits_into_prompt_and_answer():
    assert split_answer(ASKED + says("4"), None, where="") == (ASKED, "4")
    assert split_answer("4", "2+2=", where="") == ("2+2=", "4")


def test_preferences_of_a_seed_are_the_same_bytes_and_never_equal(tmp_path):
    for name in ("a", "b"):
        write_preferences(tmp_path / name, seed=3, num_train=600, num_val=20)
    first = (tmp_path / "a" / "train.parquet").read_bytes()
    assert first == (tmp_path / "b" / "train.parquet").read_bytes()
    table = pq.ParquetFile(tmp_path / "a" / "train.parquet")
    assert table.num_row_groups == 2
    rows = table.read().to_pylist()
    assert all(row["chosen"] != row["rejected"] for row in rows)
    ahead = sum(int(r["rejected"][5:]) == int(r["chosen"][5:]) + 1 for r in rows)
    assert 250 < ahead < 400
