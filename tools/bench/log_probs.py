"""Peak memory of log-probs over a large vocabulary, against the size of one logits tensor.

    python tools/bench/log_probs.py                       # 2048 tokens, 150,000 words, CPU
    python tools/bench/log_probs.py --device cuda --tokens 8192 --json out.json

Each case makes logits [N, V] from hidden states by a matrix product, as a model does, takes the
log-probs of N targets and, in the cases with a backward pass, carries gradients back to the hidden
states. Ours is `megappo.distributed.vocab_parallel`; naive is log_softmax in float32 and gather.
Peaks are over what the process had before the pass: resident memory on the CPU (Linux's VmHWM),
allocated memory on CUDA. A case has a process of its own, so that peaks do not mix. Left out: more
than one tensor-parallel rank, where each has its share of the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megappo.distributed.vocab_parallel import CHUNK_ELEMENTS, log_probs_and_entropy

HIDDEN = 64
"""Narrow, so that hidden states and the output weights are small beside the logits."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    method: str
    """`ours` or `naive`."""
    dtype: str
    backward: bool
    tokens: int
    vocab: int
    chunk_tokens: int
    """Of ours; 0 for naive."""
    device: str

    @property
    def logits_bytes(self) -> int:
        """Size of one logits tensor."""
        return self.tokens * self.vocab * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a case needed."""

    case: Case
    peak_bytes: int
    """Over what was there before the pass; the logits themselves included."""
    seconds: float

    @property
    def ratio(self) -> float:
        """Peak in logits tensors."""
        return self.peak_bytes / self.case.logits_bytes


def log_probs(logits: Tensor, targets: Tensor, case: Case) -> Tensor:
    """[N, V] logits -> [N] log-probs of the targets, by the case's method."""
    if case.method == "naive":
        return logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    found, _ = log_probs_and_entropy(
        logits, targets, tp_group=None, vocab_size=case.vocab, chunk_tokens=case.chunk_tokens
    )
    return found


def run_pass(hidden: Tensor, weight: Tensor, targets: Tensor, case: Case) -> None:
    """Forward, and backward to the hidden states where the case has one."""
    with torch.set_grad_enabled(case.backward):
        total = log_probs(hidden @ weight, targets, case).sum()
    if case.backward:
        total.backward()


def measure(case: Case) -> Result:
    """Runs the case in this process."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(case.device, dtype)

    hidden = normal(case.tokens, HIDDEN).requires_grad_(case.backward)
    weight = normal(HIDDEN, case.vocab)
    targets = torch.randint(case.vocab, (case.tokens,), generator=generator).to(case.device)
    # Libraries that load at their first call are no part of the pass.
    small = dataclasses.replace(case, vocab=16)
    run_pass(hidden[:8], weight[:, :16].contiguous(), targets[:8] % 16, small)
    before = held_bytes(case.device)
    start = time.perf_counter()
    run_pass(hidden, weight, targets, case)
    peak = peak_bytes(case.device) - before
    return Result(case=case, peak_bytes=peak, seconds=time.perf_counter() - start)


def held_bytes(device: str) -> int:
    """Memory in use now; on CUDA the count of the peak starts again."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return _status_bytes("VmRSS")


def peak_bytes(device: str) -> int:
    """Largest memory in use so far."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    """A line of Linux's /proc/self/status, which counts in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure_apart(case: Case) -> Result:
    """Runs the case in a process of its own."""
    command = [sys.executable, __file__, "--case", json.dumps(dataclasses.asdict(case))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    return Result(case=case, peak_bytes=found["peak_bytes"], seconds=found["seconds"])


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Every method, dtype and pass."""
    chunks = arguments.chunk_tokens or [CHUNK_ELEMENTS // arguments.vocab]
    methods = [("naive", 0), *(("ours", chunk) for chunk in chunks)]
    return [
        Case(
            method=method,
            dtype=dtype,
            backward=backward,
            tokens=arguments.tokens,
            vocab=arguments.vocab,
            chunk_tokens=chunk,
            device=arguments.device,
        )
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
        for method, chunk in methods
    ]


def table(results: Sequence[Result]) -> str:
    """Markdown."""
    lines = [
        "| logits | one tensor | pass | method | peak | in logits tensors | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        what = "forward + backward" if r.case.backward else "forward"
        chunk = f", {r.case.chunk_tokens} tokens a chunk" if r.case.method == "ours" else ""
        lines.append(
            f"| {r.case.dtype} | {r.case.logits_bytes / 1e9:.2f} GB | {what} "
            f"| {r.case.method}{chunk} | {r.peak_bytes / 1e9:.2f} GB | {r.ratio:.2f} "
            f"| {r.seconds:.1f} s |"
        )
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        nargs="+",
        help="tokens that ours holds in float32 at a time, a case each; the library's own choice "
        "if not given",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    arguments = parse(argv)
    if arguments.case:
        result = measure(Case(**json.loads(arguments.case)))
        print(json.dumps({"peak_bytes": result.peak_bytes, "seconds": result.seconds}))
        return
    results = [measure_apart(case) for case in cases(arguments)]
    print(f"{arguments.tokens} tokens, {arguments.vocab} words, {arguments.device}\n")
    print(table(results))
    if arguments.json:
        rows = [
            {
                **dataclasses.asdict(r.case),
                "logits_bytes": r.case.logits_bytes,
                "peak_bytes": r.peak_bytes,
                "ratio": r.ratio,
                "seconds": r.seconds,
            }
            for r in results
        ]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
