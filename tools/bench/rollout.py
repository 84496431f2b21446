"""Tokens a second of a run's whole path to SGLang, against `sglang.Engine.generate` alone.

    python -m tools.bench.rollout                              # 10M parameters, float32, CPU
    python -m tools.bench.rollout --size 135M --prompts 16 --json out.json

The path of a run is `RolloutWorker.generate`: prompts are dealt out, go through `EngineKeeper` and
`SGLangEngine`, and come back checked, decoded and padded to a batch. Against it stand bare engines
in processes of their own, which get the same token ids, sampling settings, seeds and engine
arguments, and return log-probs as well: one with our plug-ins, one with our platform alone, without
which SGLang does not run on a CPU. In each round all of them answer the same prompts, one after the
other; the others sleep meanwhile. A share is the median over the rounds of the shares in a round.
Left out: the start of the engines, several ranks, CUDA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from megappo.rollout.isolation import environment_kept, output_to
from megappo.rollout.ports import reserve_ports
from megappo.rollout.sampling import SamplingSettings, sample_seed
from megappo.rollout.sglang_settings import EngineSettings, arguments_of, environment_of
from megappo.rollout.worker import RolloutWorker
from megappo.types import Prompt, PromptBatch
from tools.bench.random_model import SHAPES, make_random_model

PROMPT_TOKENS = (8, 96)
"""Shortest and longest prompt."""
OURS = "the path of a run"
BARE = {"with-plugins": "bare, our plug-ins", "without-plugins": "bare, our platform alone"}
"""Choice of the command line -> name in the table."""
_PLATFORM = "megappo_cpu"
_SEED = 1
_START_TIMEOUT_S = 600.0

Answer = tuple[float, list[tuple[int, ...]]]
"""Seconds, and the token ids of each response."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way to the same responses."""

    path: str
    tokens: int
    """New ones of a round, of all responses."""
    seconds: float
    """Median over the rounds."""
    share: float
    """Our throughput over this path's: the median over the rounds."""
    equal: int
    """Responses with the same tokens as ours."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the median round."""
        return self.tokens / self.seconds


def prompts(count: int, *, vocab_size: int) -> PromptBatch:
    """Random prompts of uneven lengths, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(*PROMPT_TOKENS, count).long().tolist()
    ids = [torch.randint(vocab_size // 2, (n,), generator=generator).tolist() for n in lengths]
    return PromptBatch(
        epoch=0,
        prompts=tuple(
            Prompt(row=row, token_ids=tuple(x), data_source="", ground_truth="", extra_info={})
            for row, x in enumerate(ids)
        ),
    )


@contextmanager
def our_worker(settings: EngineSettings, sampling: SamplingSettings) -> Iterator[RolloutWorker]:
    """The worker of a run of one rank, with its engine."""
    from megappo.distributed import parallel
    from megappo.rollout.placement import Placement
    from megappo.rollout.recovery import EngineKeeper
    from megappo.rollout.sglang_engine import SGLangEngine

    launch = parallel.LaunchEnvironment.read()
    context = parallel.start(launch, parallel.Degrees(), device="cpu", seed=1, timeout_s=600.0)
    worker = RolloutWorker(
        engine=EngineKeeper(
            lambda: SGLangEngine(settings),
            context=context,
            weights={},
            max_restarts=0,
        ),
        placement=Placement(
            rank=0, owner_ranks=frozenset({0}), members=(0,), group=context.world_group
        ),
        context=context,
        seed=_SEED,
        n=1,
        sampling=sampling,
        sleeps=False,
    )
    try:
        yield worker
    finally:
        worker.close()
        parallel.stop(context)


class BareEngine:
    """`sglang.Engine` in a process of its own, as its users run it."""

    def __init__(self, settings: EngineSettings, *, plugins: bool) -> None:
        """Begins the start; `wait` ends it."""
        self._log_file = settings.log_file
        self._ports = reserve_ports(1, local_rank=settings.local_rank, base=settings.port_base)
        arguments = arguments_of(settings, nccl_port=self._ports.ports[0])
        environment = environment_of(settings)
        if not plugins:
            environment["SGLANG_PLUGINS"] = _PLATFORM
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(theirs, arguments, environment, settings.log_file)
        )
        self._process.start()
        theirs.close()

    def wait(self) -> Any:
        """The engine's next message; the first says that it is ready."""
        try:
            if self._pipe.poll(_START_TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            self._process.join()
        log = self._log_file.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the bare engine does not answer; its log ends with:\n{log}")

    def generate(self, ids: list[list[int]], sampling: list[dict[str, Any]]) -> Answer:
        """Answers all prompts in one call."""
        self._pipe.send((ids, sampling))
        answer: Answer = self.wait()
        return answer

    def close(self) -> None:
        """Ends the engine."""
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join()
        self._ports.release()


def _serve(
    pipe: Connection, arguments: dict[str, Any], environment: dict[str, str], log_file: Path
) -> None:
    """The process of a bare engine."""
    with environment_kept(environment), output_to(log_file):
        from sglang import Engine

        engine = Engine(**arguments)
        pipe.send("ready")
        for ids, sampling in iter(pipe.recv, None):
            start = time.perf_counter()
            outputs = engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
            seconds = time.perf_counter() - start
            pipe.send((seconds, [tuple(output["output_ids"]) for output in outputs]))
        engine.shutdown()


def measure(
    model: Path, *, batch: PromptBatch, new_tokens: int, rounds: int, bare: Sequence[str]
) -> list[Result]:
    """Starts the engines and lets them answer in turn; one warm-up round is not counted."""
    sampling = SamplingSettings(max_new_tokens=new_tokens, ignore_eos=True)
    ids = [list(prompt.token_ids) for prompt in batch.prompts]
    seeded = [
        sampling.to_sglang(seed=sample_seed(_SEED, step=1, row=prompt.row, sample=0))
        for prompt in batch.prompts
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        settings = [
            EngineSettings(
                model_path=model,
                log_file=Path(folder) / f"engine_{number}.log",
                context_length=PROMPT_TOKENS[1] + new_tokens,
                device="cpu",
                dtype="float32",
                local_rank=number,
                max_running_requests=len(ids),
            )
            for number in range(1 + len(bare))
        ]
        engines = []
        for choice, of_engine in zip(bare, settings[1:], strict=True):
            engines.append(BareEngine(of_engine, plugins=choice == "with-plugins"))
            stack.callback(engines[-1].close)
        worker = stack.enter_context(our_worker(settings[0], sampling))
        for engine in engines:
            engine.wait()
        answers = [
            [_ours(worker, batch), *(engine.generate(ids, seeded) for engine in engines)]
            for _ in range(rounds + 1)
        ]
    return summary([OURS, *(BARE[choice] for choice in bare)], answers[1:])


def _ours(worker: RolloutWorker, batch: PromptBatch) -> Answer:
    start = time.perf_counter()
    answered = worker.generate(batch, step=1)
    return time.perf_counter() - start, [c.token_ids for c in answered.completions]


def summary(paths: Sequence[str], rounds: Sequence[Sequence[Answer]]) -> list[Result]:
    """One result a path.

    Args:
        paths: names; ours is the first.
        rounds: what each path answered in each round.
    """
    results = []
    for number, path in enumerate(paths):
        seconds = [answers[number][0] for answers in rounds]
        responses = rounds[-1][number][1]
        results.append(
            Result(
                path=path,
                tokens=sum(map(len, responses)),
                seconds=statistics.median(seconds),
                share=statistics.median(answers[number][0] / answers[0][0] for answers in rounds),
                equal=sum(a == b for a, b in zip(responses, rounds[-1][0][1], strict=True)),
            )
        )
    return results


def table(results: Sequence[Result], *, num_prompts: int) -> str:
    """Markdown."""
    lines = ["| path | new tokens/s | ours / this | equal responses |", "|---|---:|---:|---:|"]
    lines += [
        f"| {r.path} | {r.tokens_per_s:,.0f} | {r.share:.3f} | {r.equal} of {num_prompts} |"
        for r in results
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--size", choices=SHAPES, default="10M", help="of a random model")
    model.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each response")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bare", nargs="+", choices=BARE, default=list(BARE), help="against what")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or make_random_model(Path(folder) / "model", arguments.size)
        vocab_size = json.loads((path / "config.json").read_text())["vocab_size"]
        results = measure(
            path,
            batch=prompts(arguments.prompts, vocab_size=vocab_size),
            new_tokens=arguments.tokens,
            rounds=arguments.rounds,
            bare=arguments.bare,
        )
    name = arguments.model or arguments.size
    print(f"{name}, {arguments.prompts} prompts x {arguments.tokens} new tokens\n")
    print(table(results, num_prompts=arguments.prompts))
    if arguments.json:
        rows = [{**asdict(r), "tokens_per_s": r.tokens_per_s} for r in results]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
