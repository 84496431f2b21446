"""Which row groups stay in memory."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megappo.data.parquet import File, RowGroupCache, read_footer, row_groups


@pytest.fixture
def groups(tmp_path):
    """Five row groups of four rows: two columns of 8 bytes a row, so 64 bytes each."""
    path = tmp_path / "rows.parquet"
    # Columns that may be null have a bit a row more.
    schema = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in "ab"])
    table = pa.table({name: range(20) for name in "ab"}, schema=schema)
    pq.write_table(table, path, row_group_size=4)
    return list(row_groups([File(path=path, metadata=read_footer(path, "train"), first_row=0)]))


def read(cache, groups, numbers):
    """Which of the given reads went to the file."""
    missed = []
    for number in numbers:
        before = cache.num_read
        table = cache.read(groups[number])
        assert table.column("a").to_pylist() == list(range(4 * number, 4 * number + 4))
        missed += [number] * (cache.num_read - before)
    return missed


def test_groups_know_their_rows(groups):
    assert [(g.first_row, g.end_row) for g in groups] == [(4 * i, 4 * i + 4) for i in range(5)]


def test_what_fits_is_read_once(groups):
    cache = RowGroupCache(max_bytes=5 * 64)
    assert read(cache, groups, [0, 1, 2, 3, 4] * 3) == [0, 1, 2, 3, 4]


def test_of_a_round_that_does_not_fit_only_the_excess_is_read_again(groups):
    cache = RowGroupCache(max_bytes=4 * 64)
    rounds = [read(cache, groups, range(5)) for _ in range(7)]
    assert rounds[0] == [0, 1, 2, 3, 4]
    assert all(len(missed) <= 2 for missed in rounds[1:])
    assert sum(len(missed) for missed in rounds[1:]) < 9, "five in each, if the oldest made room"


def test_a_group_that_is_read_row_after_row_is_read_once_however_full_the_cache_is(groups):
    cache = RowGroupCache(max_bytes=2 * 64)
    assert read(cache, groups, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == [0, 1, 2, 3, 4]


def test_bytes_are_those_of_the_columns_that_are_read(groups):
    cache = RowGroupCache(columns=["a"], max_bytes=5 * 32)
    assert cache.read(groups[0]).column_names == ["a"]
    assert read(cache, groups, [0, 1, 2, 3, 4] * 2) == [1, 2, 3, 4]


def test_one_group_is_kept_even_if_it_is_larger_than_the_bound(groups):
    cache = RowGroupCache(max_bytes=0)
    assert read(cache, groups, [3, 3, 2, 2, 3]) == [3, 2, 3]
