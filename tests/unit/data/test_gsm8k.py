import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megappo.data.gsm8k import INSTRUCTION, convert
from megappo.data.prompts import PromptDataset, read_data_sources
from megappo.errors import DataError

PUBLISHED = Path(
    os.environ.get("MEGAPPO_GSM8K_DIR", Path(__file__).parents[4] / "shared" / "data" / "gsm8k")
)


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def test_a_record_becomes_a_prompt_a_truth_and_extra_info(tmp_path, tokenizer):
    answer = "It is 500+500 = <<500+500=1000>>1,000.\n#### 1,000"
    source = write(tmp_path / "in.jsonl", {"question": "How many?", "answer": answer})
    assert convert(source, tmp_path / "new" / "out.parquet", split="train") == 1
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["out.parquet"]
    data = PromptDataset(
        tmp_path / "new" / "out.parquet", tokenizer, max_prompt_length=256, truncation="error"
    )
    (prompt,) = data.rows([0])
    text = tokenizer.decode(prompt.token_ids)
    assert text == f"<|user|>How many?\n{INSTRUCTION}<|end|><|assistant|>"
    assert "#### <number>" in text
    assert (prompt.data_source, prompt.ground_truth) == ("gsm8k", "1000")
    assert prompt.extra_info == {
        "question": "How many?",
        "answer": answer,
        "index": 0,
        "split": "train",
    }


@pytest.mark.parametrize(
    ("ending", "truth"),
    [("#### 18", "18"), ("#### -3", "-3"), ("####2,125,000 ", "2125000"), ("#### 7.50", "7.50")],
)
def test_final_numbers_lose_their_commas_only(tmp_path, ending, truth):
    source = write(tmp_path / "in.jsonl", {"question": "q", "answer": f"so #### 1\n{ending}"})
    convert(source, tmp_path / "out.parquet", split="test")
    assert pq.read_table(tmp_path / "out.parquet").column("ground_truth").to_pylist() == [truth]


GOOD = '{"question": "q", "answer": "#### 1"}'


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "line 3: every line must be a JSON object"),
        (b'"\xff"', "line 3: every line must be a JSON object"),
        (b"[1]", "line 3: needs the strings `question` and `answer`, found list"),
        (b'{"question": "q"}', "line 3: needs the strings .*, found question;"),
        (b'{"question": "q", "answer": "4"}', "line 3: the answer must end with .*ends '4'"),
        (b'{"question": "q", "answer": "#### four"}', "line 3: the answer must end with"),
    ],
)
def test_a_bad_line_is_named_and_leaves_no_file(tmp_path, bad, message):
    source = tmp_path / "in.jsonl"
    source.write_bytes(GOOD.encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(DataError, match=message):
        convert(source, tmp_path / "out.parquet", split="train")
    assert [f.name for f in tmp_path.iterdir()] == ["in.jsonl"]


def test_missing_and_empty_inputs_are_refused_and_an_earlier_result_stays(tmp_path):
    target = tmp_path / "out.parquet"
    target.write_bytes(b"earlier")
    with pytest.raises(DataError, match=r"none.jsonl is none"):
        convert(tmp_path / "none.jsonl", target, split="train")
    (tmp_path / "in.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no rows"):
        convert(tmp_path / "in.jsonl", target, split="train")
    assert target.read_bytes() == b"earlier"


@pytest.mark.skipif(
    not (PUBLISHED / "train.jsonl").is_file(),
    reason=f"the published GSM8K files are not in {PUBLISHED}; set MEGAPPO_GSM8K_DIR",
)
@pytest.mark.parametrize(("split", "num_rows"), [("train", 7473), ("test", 1319)])
def test_the_published_files_convert_whole(tmp_path, tokenizer, split, num_rows):
    source, out = PUBLISHED / f"{split}.jsonl", tmp_path / "out.parquet"
    assert convert(source, out, split=split) == num_rows
    assert pq.read_metadata(out).num_row_groups == -(-num_rows // 1000)
    assert read_data_sources(out) == ["gsm8k"]
    published = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    data = PromptDataset(out, tokenizer, max_prompt_length=4096, truncation="error")
    truths = pq.read_table(out, columns=["ground_truth"]).column("ground_truth").to_pylist()
    finals = [record["answer"].rsplit("####", 1)[1].replace(",", "") for record in published]
    assert [int(truth) for truth in truths] == [int(final) for final in finals]
    for prompt in data.rows(range(0, num_rows, 10)):
        record = published[prompt.row]
        assert prompt.ground_truth == truths[prompt.row]
        assert prompt.extra_info["question"] == record["question"]
        assert record["question"] in tokenizer.decode(prompt.token_ids)
    assert data.row_groups_read == -(-num_rows // 1000)
