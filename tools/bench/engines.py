"""Tokens a second of the two rollout engines on the same requests, and how far they agree.

    python tools/bench/engines.py --model models/tiny                # 64 prompts, 64 new tokens
    python tools/bench/engines.py --model models/smollm2 --prompts 16 --json out.json

One rank on the CPU in float32, greedy, end tokens ignored, so both engines do the same work; each
answers two requests first, to be warm. Left out: the start (SGLang's takes 20 to 60 s, the
in-process engine's nothing), tensor parallelism, CUDA.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megappo.rollout.engine import GenerationRequest, RolloutEngine
from megappo.rollout.sampling import SamplingSettings
from megappo.types import Completion

PROMPT_TOKENS = (8, 96)
"""Shortest and longest prompt."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One engine's answers."""

    engine: str
    seconds: float
    tokens: int
    """New ones, of all responses."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds


def requests(count: int, *, new_tokens: int, vocab_size: int) -> list[GenerationRequest]:
    """Random prompts of uneven lengths, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    sampling = SamplingSettings(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    lengths = torch.linspace(*PROMPT_TOKENS, count).long().tolist()
    return [
        GenerationRequest(
            token_ids=tuple(
                torch.randint(vocab_size // 2, (length,), generator=generator).tolist()
            ),
            seed=number,
            sampling=sampling,
        )
        for number, length in enumerate(lengths)
    ]


def measure(
    name: str, engine: RolloutEngine, wanted: Sequence[GenerationRequest]
) -> tuple[Measured, list[Completion]]:
    """Warms up, then answers all requests in one call."""
    engine.generate(wanted[:2])
    start = time.perf_counter()
    answers = engine.generate(wanted)
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.token_ids) for answer in answers)
    return Measured(engine=name, seconds=seconds, tokens=tokens), answers


def megatron_engine(model: Path, *, context_length: int, num_requests: int) -> RolloutEngine:
    """The in-process engine of a world of one rank."""
    from transformers import AutoTokenizer

    from megappo.distributed import parallel
    from megappo.models.build import build_chunk, transformer_config
    from megappo.models.spec import load_spec
    from megappo.models.weights import load_hf_weights
    from megappo.rollout.megatron_engine import MegatronEngine

    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(launch, parallel.Degrees(), device="cpu", seed=1, timeout_s=120.0)
    spec = load_spec(model)
    settings = transformer_config(spec, tp=1, pp=1)
    chunk = build_chunk(spec, settings, head="lm", pre_process=True, post_process=True)
    load_hf_weights([chunk], model, spec, head="lm")
    return MegatronEngine(
        chunk=chunk,
        vocab_size=spec.vocab_size,
        memory=None,
        context=context,
        tokenizer=AutoTokenizer.from_pretrained(model),
        end_tokens=frozenset(),
        context_length=context_length,
        max_running_requests=num_requests,
    )


def sglang_engine(
    model: Path, log_file: Path, *, context_length: int, num_requests: int
) -> RolloutEngine:
    """SGLang with the settings that a run on the CPU uses."""
    from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine

    return SGLangEngine(
        EngineSettings(
            model_path=model,
            log_file=log_file,
            context_length=context_length,
            device="cpu",
            dtype="float32",
            max_running_requests=num_requests,
        )
    )


def agreement(first: Sequence[Completion], second: Sequence[Completion]) -> tuple[int, float]:
    """Responses with equal tokens, and the largest log-prob difference over those, nats."""
    equal = [(a, b) for a, b in zip(first, second, strict=True) if a.token_ids == b.token_ids]
    gaps = [abs(x - y) for a, b in equal for x, y in zip(a.log_probs, b.log_probs, strict=True)]
    return len(equal), max(gaps, default=0.0)


def table(results: Sequence[Measured]) -> str:
    """Markdown, with the first engine's throughput as the measure."""
    lines = ["| engine | new tokens/s | of the first |", "|---|---:|---:|"]
    for r in results:
        share = r.tokens_per_s / results[0].tokens_per_s
        lines.append(f"| {r.engine} | {r.tokens_per_s:,.0f} | {share:.2f} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each response")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    arguments = parse(argv)
    size = {
        "context_length": PROMPT_TOKENS[1] + arguments.tokens,
        "num_requests": arguments.prompts,
    }
    vocab_size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    wanted = requests(arguments.prompts, new_tokens=arguments.tokens, vocab_size=vocab_size)
    with (
        tempfile.TemporaryDirectory() as folder,
        sglang_engine(arguments.model, Path(folder) / "engine.log", **size) as engine,
    ):
        sglang, theirs = measure("sglang", engine, wanted)
    with megatron_engine(arguments.model, **size) as engine:
        megatron, ours = measure("megatron", engine, wanted)
    equal, gap = agreement(theirs, ours)
    print(f"{arguments.model}, {arguments.prompts} prompts x {arguments.tokens} new tokens\n")
    print(table([sglang, megatron]))
    print(f"\nequal tokens in {equal} of {len(wanted)} responses, log-probs within {gap:.1e} there")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in (sglang, megatron)], indent=1))


if __name__ == "__main__":
    main()
