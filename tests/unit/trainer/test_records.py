import json

import pytest
import torch

from megappo.trainer.records import Records, token_texts
from megappo.types import Completion, Prompt, collate
from tests.tiny_run import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()  # a token a byte


@pytest.mark.parametrize("text", ["two words\n", "naïve €5 😀!", "a<|im_end|>", "", "</script>"])
def test_the_tokens_joined_are_the_response(tokenizer, text):
    ids = tokenizer.encode(text)
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_a_character_stands_at_its_last_token_also_where_the_response_is_cut_in_it(tokenizer):
    ids = tokenizer.encode("x€")  # four bytes
    assert token_texts(ids, tokenizer) == ["x", "", "", "€"]
    assert token_texts(ids[:3], tokenizer) == ["x", "", "\ufffd"]
    assert token_texts(ids[3:] * 5, tokenizer)[-1].startswith("\ufffd")


def test_a_space_before_a_word_is_kept():
    """A SentencePiece-like decoder drops the first one of what it decodes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={"▁two": 0, "▁words": 1, "!": 2}, merges=[]))
    core.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert tokenizer.decode([1]) == "words"
    assert token_texts([0, 1, 2, 1], tokenizer) == ["two", " words", "!", " words"]


def make_records(folder, *, rollouts=1, tokens=0, say=lambda text: None) -> Records:
    return Records(folder, rollouts_per_step=rollouts, tokens_per_sample=tokens, say=say)


def make_batch(ids, *, size):
    """The same answer `size` times; the reward of the second one failed where there is one."""
    prompt = Prompt(row=7, token_ids=(1, 2), data_source="s", ground_truth="t", extra_info={})
    answer = Completion(
        token_ids=ids,
        log_probs=tuple(-0.123456 * i for i in range(len(ids))),
        finish_reason="stop",
        text="one two",
    )
    return collate([prompt] * size, [answer] * size).with_scores(
        torch.ones(size), torch.tensor([i == 1 for i in range(size)])
    )


def test_samples_have_tokens_and_log_probs_up_to_the_limit(tmp_path, tokenizer):
    ids = tuple(tokenizer.encode("one two"))
    batch = make_batch(ids, size=3)
    make_records(tmp_path, rollouts=2, tokens=3).write_rollouts(5, batch, tokenizer)
    lines = (tmp_path / "rollouts" / "step_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.0, None]
    sample = json.loads(lines[0])
    assert (sample["tokens"], sample["log_probs"]) == (["o", "n", "e"], [0.0, -0.1235, -0.2469])
    assert sample["response"] == "one two"
    make_records(tmp_path, rollouts=1, tokens=0).write_rollouts(6, batch, tokenizer)
    assert "tokens" not in (tmp_path / "rollouts" / "step_000006.jsonl").read_text().replace(
        "response_tokens", ""
    )


FULL = (
    "warning    {} cannot be written: [Errno 28] No space left on device; the run goes on without"
)


def test_a_full_disk_is_told_once_and_again_after_it_had_room(tmp_path, tokenizer):
    told: list[str] = []
    records = make_records(tmp_path, say=told.append)
    batch = make_batch(tuple(tokenizer.encode("one")), size=1)
    samples, events = tmp_path / "rollouts", tmp_path / "events.jsonl"
    for step in (1, 2):
        (samples / f"step_00000{step}.jsonl").symlink_to("/dev/full")
        records.write_rollouts(step, batch, tokenizer)
    events.symlink_to("/dev/full")
    for step in (1, 2):
        records.event("saved", step)
    assert told == [FULL.format("rollouts/"), FULL.format("events.jsonl")]
    events.unlink()
    records.event("saved", 3)
    assert [json.loads(line)["step"] for line in events.read_text().splitlines()] == [3]
    events.unlink()
    events.symlink_to("/dev/full")
    records.event("saved", 4)
    assert told[2:] == [FULL.format("events.jsonl")]


def test_an_event_that_was_cut_off_does_not_swallow_the_next_one(tmp_path):
    records = make_records(tmp_path)
    events = tmp_path / "events.jsonl"
    records.event("saved", 1)
    with events.open("a") as file:
        file.write('{"time": 1.0, "kind"')
    records.event("saved", 2)
    records.event("saved", 3)
    lines = events.read_text().splitlines()
    assert lines[1] == '{"time": 1.0, "kind"'
    assert [json.loads(line)["step"] for line in (lines[0], *lines[2:])] == [1, 2, 3]
