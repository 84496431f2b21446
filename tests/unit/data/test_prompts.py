import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.data.prompts import PromptDataset, check_files, read_data_sources
from megappo.data.sampler import PromptSampler, rank_share
from megappo.errors import DataError, UserError

LIMITS = {"max_prompt_length": 64, "truncation": "error"}


def row(i, text=None):
    return {
        "prompt": [{"role": "user", "content": text or f"question {i}"}],
        "data_source": "even" if i % 2 == 0 else "odd",
        "ground_truth": str(i * i),
        "level": i,
    }


def write(path, rows, *, row_group_size=4):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def two_files(tmp_path):
    """10 + 6 rows in row groups of 4, 4, 2 and 4, 2."""
    return [
        write(tmp_path / "a.parquet", [row(i) for i in range(10)]),
        write(tmp_path / "b.parquet", [row(i) for i in range(10, 16)]),
    ]


def text_of(prompt, tokenizer):
    return tokenizer.decode(prompt.token_ids)


# Files and columns.


def test_rows_are_numbered_over_all_files_and_come_in_the_asked_order(two_files, tokenizer):
    data = PromptDataset(two_files, tokenizer, **LIMITS)
    assert len(data) == data.num_rows == check_files(two_files) == 16
    prompts = data.rows([12, 0, 9, 12])
    assert [p.row for p in prompts] == [12, 0, 9, 12]
    assert text_of(prompts[0], tokenizer) == "<|user|>question 12<|end|><|assistant|>"
    assert (prompts[0].data_source, prompts[0].ground_truth) == ("even", "144")
    assert prompts[0].extra_info == {"level": 12}


def test_verl_files_are_read_as_they_are(tmp_path, tokenizer):
    cells = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2"}],
        "ability": "math",
        "index": 5,
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    file = write(tmp_path / "verl.parquet", [cells])
    (prompt,) = PromptDataset([file], tokenizer, **LIMITS).rows([0])
    assert prompt.ground_truth == "4"
    assert prompt.extra_info == {
        "ability": "math",
        "reward_model": {"style": "rule"},
        "split": "train",
        "index": 0,
    }


@pytest.mark.parametrize(
    ("truth", "expected"),
    [("4", "4"), (4, "4"), (["a", "b"], '["a", "b"]'), ({"t": 1}, '{"t": 1}')],
)
def test_ground_truths_of_other_types_become_text(tmp_path, tokenizer, truth, expected):
    file = write(tmp_path / "t.parquet", [{**row(0), "ground_truth": truth}])
    assert PromptDataset([file], tokenizer, **LIMITS).rows([0])[0].ground_truth == expected


def test_plain_text_prompts_and_another_prompt_column(tmp_path, tokenizer):
    file = write(tmp_path / "t.parquet", [{**row(0), "question": "two and two"}])
    data = PromptDataset([file], tokenizer, prompt_key="question", **LIMITS)
    (prompt,) = data.rows([0])
    assert text_of(prompt, tokenizer) == "two and two"
    assert prompt.extra_info["prompt"] == row(0)["prompt"]


def test_keys_that_only_arrow_made_do_not_reach_the_template(tmp_path, make_tokenizer):
    shows_calls = "{% for m in messages %}{{ 'calls' if 'tool_calls' in m else '-' }}{% endfor %}"
    with_calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    chats = [row(0)["prompt"], [*row(1)["prompt"], with_calls, {"role": "tool", "content": "ok"}]]
    rows = [{**row(i), "prompt": chat} for i, chat in enumerate(chats)]
    file = write(tmp_path / "t.parquet", rows)
    tokenizer = make_tokenizer(template=shows_calls)
    prompts = PromptDataset([file], tokenizer, **LIMITS).rows([0, 1])
    assert [text_of(p, tokenizer) for p in prompts] == ["-", "-calls-"]


def test_a_raw_gsm8k_file_is_refused_by_its_columns(tmp_path):
    file = write(tmp_path / "raw.parquet", [{"question": "2+2", "answer": "#### 4"}])
    message = (
        r"val file .*raw.parquet needs the columns prompt, data_source and ground_truth .*"
        r"missing: prompt, data_source, ground_truth; found: question, answer.*megappo data gsm8k"
    )
    with pytest.raises(DataError, match=message):
        check_files([file], name="val")


def test_every_file_is_checked_and_not_only_the_first(tmp_path, two_files):
    lacking = {k: v for k, v in row(0).items() if k != "ground_truth"}
    file = write(tmp_path / "c.parquet", [{**lacking, "reward_model": {"style": "rule"}}])
    with pytest.raises(DataError, match=r"c.parquet .*missing: ground_truth; found: prompt, "):
        check_files([*two_files, file])


def test_missing_broken_and_empty_files_are_refused_by_name(tmp_path):
    (tmp_path / "text.parquet").write_text("question,answer\n")
    empty = pa.Table.from_pylist([row(0)]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    for name, message in [
        ("none.parquet", "does not exist"),
        ("text.parquet", "must be Parquet"),
        ("empty.parquet", "has 0 rows"),
    ]:
        with pytest.raises(DataError, match=rf"train file .*{name} {message}.*data.train_files"):
            check_files([tmp_path / name])
    with pytest.raises(DataError, match="at least one Parquet file"):
        check_files([])


def test_checking_reads_no_rows(two_files):
    # The pages are overwritten with zeros; only the footer at the end stays.
    content = two_files[0].read_bytes()
    footer_bytes = int.from_bytes(content[-8:-4], "little") + 8
    body_bytes = len(content) - 4 - footer_bytes
    two_files[0].write_bytes(content[:4] + bytes(body_bytes) + content[-footer_bytes:])
    assert check_files(two_files) == 16
    with pytest.raises(DataError, match=r"a.parquet: row group 0 cannot be read"):
        read_data_sources(two_files)


def test_data_sources_are_distinct_and_sorted(two_files, tokenizer):
    assert read_data_sources(two_files) == ["even", "odd"]
    data = PromptDataset(two_files, tokenizer, **LIMITS)
    assert data.data_sources() == ["even", "odd"]
    assert data.row_groups_read == 0


def test_rows_without_a_data_source_or_ground_truth_are_refused(tmp_path, tokenizer):
    for column in ("data_source", "ground_truth"):
        file = write(tmp_path / f"{column}.parquet", [row(0), {**row(1), column: None}])
        data = PromptDataset([file], tokenizer, **LIMITS)
        with pytest.raises(DataError, match=rf"train row 1 .*{column}"):
            data.rows([0, 1])
    with pytest.raises(DataError, match="1 of row group 0 have none"):
        read_data_sources([tmp_path / "data_source.parquet"])


# Row groups.


def test_each_row_group_is_read_only_when_needed_and_once(two_files, tokenizer):
    data = PromptDataset(two_files, tokenizer, **LIMITS)
    assert data.row_groups_read == 0
    data.rows([1, 3, 0])
    assert data.row_groups_read == 1
    data.rows([2, 9, 3])
    assert data.row_groups_read == 2, "group 0 is kept, group 2 is new, group 1 is not touched"
    data.rows(range(16))
    assert data.row_groups_read == 5


def test_without_a_cache_a_call_still_reads_each_row_group_once(two_files, tokenizer):
    data = PromptDataset(two_files, tokenizer, max_cached_bytes=0, **LIMITS)
    assert [p.row for p in data.rows([0, 4, 1, 5])] == [0, 4, 1, 5]
    assert data.row_groups_read == 2


def test_ranks_together_read_the_batch_of_one_rank(two_files, tokenizer):
    _, batch = PromptSampler(16, batch_size=8, seed=0, shuffle=True).next_batch()
    whole = PromptDataset(two_files, tokenizer, **LIMITS).rows(batch)
    shares = []
    for rank in range(2):
        data = PromptDataset(two_files, tokenizer, **LIMITS)
        shares.append(data.rows(rank_share(batch, mini_batch_size=4, dp_rank=rank, dp_size=2)))
    first, second = shares
    assert [*first[:2], *second[:2], *first[2:], *second[2:]] == whole


# Limits.


@pytest.fixture
def long_file(tmp_path):
    """Row 3 of 6 renders to 558 ids, the others to 13: three markers and ten bytes."""
    rows = [row(i, "x" * 555 if i == 3 else "y" * 10) for i in range(6)]
    return write(tmp_path / "long.parquet", rows, row_group_size=2)


def test_an_overlong_prompt_stops_by_default_and_names_its_row(long_file, tokenizer):
    data = PromptDataset(long_file, tokenizer, max_prompt_length=512, truncation="error")
    data.rows([0, 1, 2])
    with pytest.raises(DataError, match=r"train row 3 .*long.parquet, its row 3.*558 tokens.*512"):
        data.rows([3])
    with pytest.raises(DataError, match="train row 3 "):
        data.check_prompts()


def test_an_overlong_prompt_can_be_cut_from_the_left(long_file, tokenizer):
    data = PromptDataset(long_file, tokenizer, max_prompt_length=512, truncation="left")
    lengths = [len(p.token_ids) for p in data.rows(range(6))]
    assert lengths == [13, 13, 13, 512, 13, 13]
    assert data.rows([3])[0].token_ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    data.check_prompts()


def test_overlong_prompts_can_be_dropped_and_are_counted(long_file, tokenizer, caplog):
    caplog.set_level("INFO", logger="megappo.data.prompts")
    data = PromptDataset(long_file, tokenizer, max_prompt_length=512, truncation="drop")
    assert list(data.usable_rows()) == [0, 1, 2, 4, 5]
    assert (len(data), data.num_rows, data.num_dropped) == (5, 6, 1)
    assert caplog.messages == ["train: 6 rows read, 1 dropped with prompts over 512 tokens"]
    assert [p.row for p in data.rows([3, 2])] == [4, 2]
    assert data.row_groups_read == 2, "the pass over lengths is not kept in the cache"


def test_the_limit_counts_system_text_and_tools(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer(template="{{ tools | tojson }}{{ messages[0].content }}")
    file = write(tmp_path / "t.parquet", [row(0, "z" * 60)])
    data = PromptDataset(file, tokenizer, template_args={"tools": [{"name": "f"}]}, **LIMITS)
    # 60 bytes fit in 64, and with the 15 of [{"name": "f"}] they do not.
    with pytest.raises(DataError, match="75 tokens"):
        data.rows([0])


def test_a_file_of_overlong_prompts_only_is_refused_with_the_numbers(long_file, tokenizer):
    data = PromptDataset(long_file, tokenizer, max_prompt_length=12, truncation="drop")
    with pytest.raises(DataError, match=r"6 rows read and all dropped.*max_prompt_length 12"):
        len(data)


def test_rows_left_after_dropping_must_fill_a_batch(long_file, tokenizer):
    data = PromptDataset(long_file, tokenizer, max_prompt_length=512, truncation="drop")
    with pytest.raises(DataError, match="5 < 6: 6 rows read, 1 dropped"):
        PromptSampler(len(data), batch_size=6, seed=0, shuffle=True, num_dropped=data.num_dropped)


def test_an_unknown_truncation_is_refused_before_any_file_is_read(tokenizer):
    with pytest.raises(UserError, match=r"'right'.*known: error, left, drop"):
        PromptDataset("none.parquet", tokenizer, max_prompt_length=1, truncation="right")


def test_the_source_of_each_usable_row_is_known_without_rendering(two_files, tmp_path, tokenizer):
    data = PromptDataset(two_files, tokenizer, **LIMITS)
    assert data.source_of_each() == ["even", "odd"] * 8
    assert data.row_groups_read == 0
    rows = [row(0), row(1, "long " * 100), row(2), row(3)]
    file = write(tmp_path / "long.parquet", rows)
    kept = PromptDataset([file], tokenizer, max_prompt_length=64, truncation="drop")
    assert kept.source_of_each() == ["even", "even", "odd"]
