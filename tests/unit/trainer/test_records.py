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


def test_samples_have_tokens_and_log_probs_up_to_the_limit(tmp_path, tokenizer):
    ids = tuple(tokenizer.encode("one two"))
    prompt = Prompt(row=7, token_ids=(1, 2), data_source="s", ground_truth="t", extra_info={})
    answer = Completion(
        token_ids=ids,
        log_probs=tuple(-0.123456 * i for i in range(len(ids))),
        finish_reason="stop",
        text="one two",
    )
    batch = collate([prompt] * 3, [answer] * 3).with_scores(
        torch.ones(3), torch.tensor([False, True, False])
    )
    Records(tmp_path, rollouts_per_step=2, tokens_per_sample=3).write_rollouts(5, batch, tokenizer)
    lines = (tmp_path / "rollouts" / "step_000005.jsonl").read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.0, None]
    sample = json.loads(lines[0])
    assert (sample["tokens"], sample["log_probs"]) == (["o", "n", "e"], [0.0, -0.1235, -0.2469])
    assert sample["response"] == "one two"
    Records(tmp_path, rollouts_per_step=1, tokens_per_sample=0).write_rollouts(6, batch, tokenizer)
    assert "tokens" not in (tmp_path / "rollouts" / "step_000006.jsonl").read_text().replace(
        "response_tokens", ""
    )
