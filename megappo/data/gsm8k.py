"""GSM8K as published (JSON lines of question and answer) -> the Parquet format of `prompts`.

Cobbe et al. 2021, https://arxiv.org/abs/2110.14168. Every published answer ends "#### N"; N,
without its thousands commas, becomes `ground_truth`. The prompt asks for the same ending, which the
`gsm8k` reward looks for. The published reasoning is kept in `extra_info`; the model never sees it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megappo.errors import DataError

INSTRUCTION = 'Work it out step by step, then write the result on a last line as "#### <number>".'
ROW_GROUP_ROWS = 1000
"""Small enough that a rank which needs a few rows reads little."""

_FINAL_NUMBER = re.compile(r"####\s*(-?\d[\d,]*(?:\.\d+)?)\s*$")


def convert(in_jsonl: str | Path, out_parquet: str | Path, *, split: str) -> int:
    """Converts one published file; returns its number of rows.

    The result is written beside its final name and renamed when complete, so a reader never meets
    half a file and an error leaves an earlier result as it was.

    Args:
        in_jsonl: one object a line with `question` and `answer`; blank lines are passed over.
        out_parquet: columns prompt, data_source, ground_truth, extra_info.
        split: stored in `extra_info`, "train" or "test".

    Raises:
        DataError: the input is missing or empty, or a line of it cannot be used.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    source, target = Path(in_jsonl), Path(out_parquet)
    if not source.is_file():
        raise DataError(f"the input must be a file, and {source} is none; check the path")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    rows = _rows(source, split)
    num_rows = 0
    schema = _schema()
    try:
        with pq.ParquetWriter(unfinished, schema) as writer:
            while group := list(islice(rows, ROW_GROUP_ROWS)):
                writer.write_table(pa.Table.from_pylist(group, schema=schema))
                num_rows += len(group)
        if not num_rows:
            raise DataError(f"{source} has no rows; give a GSM8K file with one object a line")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows


def _schema() -> Any:
    import pyarrow as pa

    text = pa.string()
    message = pa.struct([("role", text), ("content", text)])
    extra = pa.struct(
        [("question", text), ("answer", text), ("index", pa.int64()), ("split", text)]
    )
    return pa.schema(
        [
            ("prompt", pa.list_(message)),
            ("data_source", text),
            ("ground_truth", text),
            ("extra_info", extra),
        ]
    )


def _rows(source: Path, split: str) -> Iterator[dict[str, Any]]:
    index = 0
    # Bytes, so that a line that is not UTF-8 is reported with its number too.
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            question, answer, final = _parse(line, where=f"{source} line {number}")
            yield {
                "prompt": [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}],
                "data_source": "gsm8k",
                "ground_truth": final,
                "extra_info": {
                    "question": question,
                    "answer": answer,
                    "index": index,
                    "split": split,
                },
            }
            index += 1


def _parse(line: bytes, *, where: str) -> tuple[str, str, str]:
    """Question, answer, and the final number without commas."""
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: every line must be a JSON object: {error}; mend it") from error
    found = record if isinstance(record, dict) else {}
    question, answer = found.get("question"), found.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(
            f"{where}: needs the strings `question` and `answer`, found "
            f"{', '.join(sorted(found)) or type(record).__name__}; mend or remove the line"
        )
    final = _FINAL_NUMBER.search(answer)
    if final is None:
        raise DataError(
            f"{where}: the answer must end with `#### <number>`, and ends {answer[-40:]!r}; "
            "mend or remove the line"
        )
    return question, answer, final.group(1).replace(",", "")
