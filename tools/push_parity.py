"""Pushes trained weights into real SGLang engines from many layouts, and asks transformers whether.

    python tools/push_parity.py                                   # prints the table
    python tools/push_parity.py --write docs/parallelism.md       # and puts it into the document
    python tools/push_parity.py --only qwen3 --rollout-tp 2 --json table.json

For each model, each number of processes of an engine and each training layout: engines start with
other weights than the trainer's, as `rollout.placement` has it; the trainer's are pushed, every
rank generates greedily, then one optimizer step is taken and its weights are pushed. The tokens
must be those that transformers finds likeliest, and the log-probs its own within 1e-4:

- of the weights before the step with transformers' model of the folder that Megatron read, which
  never went through an export;
- of the weights after the step with the trainer's own forward pass, and with transformers' model of
  the exported weights.

Both weights are then pushed again in other buckets (one tensor, 1 MB, everything, in turns, so that
each push changes all weights), and the answers must be equal to the first, bit for bit. After every
push SGLang's checksums are compared too. Exit code 1 if something differs.

Engines start slowly, so one serves all layouts of a world size, which run in one process a rank.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from tools.parallel_table import run_ranks, save_model, write_table  # noqa: E402

BOUND = 1e-4
"""Nats, float32."""
PROMPTS, RESPONSE = 4, 10
BUCKETS = {"one tensor": 1, "1 MB": 1_000_000, "everything": 1 << 40}
TURNS = (
    ("after", "one tensor"), ("before", "one tensor"), ("after", "1 MB"), ("before", "1 MB"),
)  # fmt: skip
"""Pushes that follow the two in one bucket: which weights, and which buckets."""
START, END = "<!-- table: tools/push_parity.py -->", "<!-- end of push table -->"

COMMON: dict[str, Any] = {
    "vocab_size": 131,  # odd: TP pads it
    "hidden_size": 64,
    "intermediate_size": 416,  # over 1 MB of weights
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.5,
    "high_freq_factor": 6.0, "original_max_position_embeddings": 32,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_tied": {"model_type": "llama", **TIED},
    "llama_one_kv_head": {"model_type": "llama", "num_key_value_heads": 1, **TIED},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", **TIED},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_one_kv_head": {"model_type": "qwen3", "head_dim": 32, "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen3_moe": MOE,
    "qwen3_moe_tied": MOE | TIED | {"num_experts": 4, "norm_topk_prob": False},
}
"""Biases are random like all weights; an expert's share of width at TP 2 is 24."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the trainer is split."""

    title: str
    ranks: int
    overrides: tuple[str, ...] = ()


TP2, SP, PP2, EP2 = (
    "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2", "parallel.ep=2",
)  # fmt: skip
LAYOUTS: dict[str, Layout] = {
    "tp1": Layout(title="TP1 (x DP2)", ranks=2),
    "tp2": Layout(title="TP2", ranks=2, overrides=(TP2,)),
    "tp2_sp": Layout(title="TP2 + SP, ETP2", ranks=2, overrides=(TP2, SP)),
    "pp2": Layout(title="PP2", ranks=2, overrides=(PP2,)),
    "ep2": Layout(title="EP2 (over DP2)", ranks=2, overrides=(EP2,)),
    "tp2_dp2": Layout(title="TP2 x DP2", ranks=4, overrides=(TP2,)),
    "tp2_sp_ep2": Layout(title="TP2 + SP x DP2, EP2 x ETP2", ranks=4, overrides=(TP2, SP, EP2)),
}


def layouts_of(model: str) -> list[str]:
    """Layouts that divide a model."""
    if MODELS[model]["model_type"] == "qwen3_moe":
        return ["tp1", "tp2_sp", "pp2", "ep2", "tp2_sp_ep2"]
    if MODELS[model].get("num_key_value_heads") == 1:
        return ["tp1", "pp2"]
    return ["tp1", "tp2", "pp2", "tp2_dp2"]


@dataclass(frozen=True, kw_only=True, order=True)
class Case:
    """One row of the table."""

    model: str
    rollout_tp: int
    layout: str

    @property
    def file(self) -> str:
        """Where rank R's results lie, less its number."""
        return f"{self.model}.{self.rollout_tp}.{self.layout}"


def all_cases() -> list[Case]:
    """The whole table."""
    return [
        Case(model=model, rollout_tp=tp, layout=layout)
        for model in MODELS
        for tp in (1, 2)
        for layout in layouts_of(model)
    ]


CONFIG = """\
device: cpu
model: {{path: "{trained}", dtype: float32}}
data: {{train_files: [none.parquet], val_files: [none.parquet], train_batch_size: 4}}
rollout: {{tp: {rollout_tp}}}
actor: {{optim: {{lr: 1.0e-2, eps: 1.0e-3}}, use_kl_loss: false, mini_batch_size: 4,
  micro_batch_size: 2}}
critic: {{micro_batch_size: 2}}
trainer: {{run_dir: "{root}/run"}}
"""


def make_inputs(root: Path, models: Sequence[str]) -> None:
    """Two random models of each kind: the engine's, and the trainer's."""
    for model in models:
        for seed, part in enumerate(("engine", "trained")):
            save_model(root / model / part, COMMON | MODELS[model], seed)
            _save_tokenizer(root / model / part)
        for tp in (1, 2):
            text = CONFIG.format(trained=root / model / "trained", rollout_tp=tp, root=root)
            (root / model / f"rollout_tp{tp}.yaml").write_text(text)


def _save_tokenizer(folder: Path) -> None:
    """One word a token."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{i}": i for i in range(COMMON["vocab_size"])},
            "unk_token": "w0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# What follows runs on every rank.


def work(root: Path, cases: Sequence[Case], ports: Sequence[int]) -> None:
    """Runs cases one after another on this rank; those of one engine stand next to each other."""
    from megappo.distributed import cpu_backend

    cpu_backend.install("cpu")  # before SGLang, which imports Megatron
    engine: Any = None
    held: tuple[str, int] | None = None
    rank = int(os.environ["RANK"])
    try:
        for case, port in zip(cases, ports, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            if held != (case.model, case.rollout_tp):
                if engine is not None:
                    engine.shutdown()
                held = (case.model, case.rollout_tp)
                engine = _start(root, case, rank) if rank % case.rollout_tp == 0 else None
            torch.save(_run(root, case, engine), root / f"{case.file}.{rank}.pt")
    finally:
        if engine is not None:
            engine.shutdown()


def _start(root: Path, case: Case, rank: int) -> Any:
    from megappo.rollout.sglang_engine import EngineSettings, SGLangEngine

    settings = EngineSettings(
        model_path=root / case.model / "engine",
        log_file=root / f"engine.{case.model}.{case.rollout_tp}.{rank}.log",
        context_length=64,
        device="cpu",
        dtype="float32",
        tp_size=case.rollout_tp,
        local_rank=rank,
        max_running_requests=8,
        verify_sync="always",
    )
    return SGLangEngine(settings)


def _run(root: Path, case: Case, engine: Any) -> dict[str, Any]:
    """One layout: all pushes and what the engines answered this rank's replica."""
    from megappo.config import load
    from megappo.distributed import parallel
    from megappo.models.hf_export import export_hf
    from megappo.models.spec import load_spec
    from megappo.trainer.build import build_roles
    from megappo.trainer.preflight import model_paths

    config = load(
        root / case.model / f"rollout_tp{case.rollout_tp}.yaml", LAYOUTS[case.layout].overrides
    )
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees.of(config.parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=600)
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, *_ = build_roles(config, specs, context, total_optimizer_steps=2)
    pusher = _Pusher(case, engine, context, specs["actor"])
    network = actor.policy.network

    def export() -> Iterator[tuple[str, Tensor]]:
        return export_hf(actor.trainable.chunks, network.spec)

    answers = {"before": pusher.push(export, "everything")}
    weights = {"before": {name: tensor.clone() for name, tensor in export()}}
    _step(actor, answers["before"])
    answers["after"] = pusher.push(export, "everything")
    weights["after"] = {name: tensor.clone() for name, tensor in export()}
    by_trainer, _ = actor.log_probs(answers["after"], [range(PROMPTS)])
    same = {}
    for which, buckets in TURNS:
        again = pusher.push(lambda which=which: iter(weights[which].items()), buckets)
        same[f"{which}, {buckets}"] = again.completions == answers[which].completions
    found = {
        "answers": {which: _plain(batch) for which, batch in answers.items()},
        "weights": weights["after"] if context.is_main else {},
        "trainer_difference": (by_trainer - answers["after"].rollout_log_probs).abs().max().item(),
        "same": same,
        "num_verified": pusher.num_verified,
    }
    parallel.stop(context)
    return found


class _Pusher:
    """Pushes weights and asks for greedy answers as a run does."""

    def __init__(self, case: Case, engine: Any, context: Any, spec: Any) -> None:
        from megappo.distributed.parallel import group_of, replicas
        from megappo.models.weights import hf_names
        from megappo.rollout.placement import Placement, sharing_domains
        from megappo.rollout.recovery import EngineKeeper
        from megappo.rollout.sampling import SamplingSettings
        from megappo.rollout.worker import RolloutWorker

        layout = replicas(tp=context.tp, cp=context.cp, dp=context.dp, pp=context.pp)
        domains = sharing_domains(layout, case.rollout_tp)
        self.engine = engine
        self.num_verified = 0
        self._version = 0 if engine is None else engine.weight_version
        self._dp_rank = context.dp_rank
        self._worker = RolloutWorker(
            engine=EngineKeeper(
                None if engine is None else lambda: engine,
                context=context,
                weights=hf_names(spec),
                max_restarts=0,
            ),
            placement=Placement(
                rank=context.rank,
                owner_ranks=frozenset(range(0, context.world_size, case.rollout_tp)),
                members=tuple(next(d for d in domains if context.rank in d)),
                group=group_of(context.rank, domains, timeout_s=600),
            ),
            context=context,
            seed=0,
            n=1,
            sampling=SamplingSettings(max_new_tokens=RESPONSE, temperature=0.0, ignore_eos=True),
            sleeps=False,
        )

    def push(self, tensors: Any, buckets: str) -> Any:
        """What the engines answer with the weights that `tensors()` yields. Collective."""

        @contextmanager
        def source() -> Iterator[Iterator[tuple[str, Tensor]]]:
            yield tensors()

        if self.engine is not None:
            self.engine.settings = dataclasses.replace(
                self.engine.settings, bucket_bytes=BUCKETS[buckets]
            )
        self._version += 1
        metrics = self._worker.push(source, version=self._version)
        self.num_verified = int(metrics["rollout/sync_verified"])
        return self._worker.generate(_prompts(self._dp_rank), step=self._version)


def _prompts(dp_rank: int) -> Any:
    """Prompts of a replica, of uneven lengths."""
    from megappo.types import Prompt, PromptBatch

    generator = torch.Generator().manual_seed(dp_rank)
    return PromptBatch(
        epoch=0,
        prompts=tuple(
            Prompt(
                row=dp_rank * PROMPTS + i,
                token_ids=tuple(torch.randint(2, 131, (3 + 5 * i,), generator=generator).tolist()),
                data_source="",
                ground_truth="",
                extra_info={},
            )
            for i in range(PROMPTS)
        ),
    )


def _step(actor: Any, batch: Any) -> None:
    """One optimizer step of the policy loss with made-up advantages. Collective over the world."""
    from megappo.distributed.metrics import Tally
    from megappo.types import MiniBatch

    tally = Tally()
    tally.declare(actor.means, actor.MAXIMA)
    samples = batch.with_fields(
        old_log_probs=actor.log_probs(batch, [range(PROMPTS)])[0],
        advantages=torch.sin(torch.arange(batch.responses.numel()) * 1.7).view_as(batch.responses),
    )
    micro_batches = ((0, 1), (2, 3))
    actor.update(MiniBatch(samples=samples, micro_batches=micro_batches), tally, is_first=True)


def _plain(batch: Any) -> list[tuple[list[int], list[int], list[float]]]:
    return [
        (list(p.token_ids), list(c.token_ids), list(c.log_probs))
        for p, c in zip(batch.prompts, batch.completions, strict=True)
    ]


# What follows runs in the process that starts the ranks.


@dataclass(frozen=True, kw_only=True)
class Result:
    """How far the engines are from the oracles in one case: the worst of its ranks."""

    case: Case
    before: float
    """log-probs against transformers on the folder that the trainer read, nats"""
    after: float
    """against transformers on the exported weights after a step, nats"""
    trainer: float
    """against the trainer's own log-probs after it, nats"""
    tokens: bool
    """every token is the likeliest"""
    buckets: bool
    """the answers do not depend on the buckets"""
    moved: float
    """what the optimizer step changed: its largest difference over the same tokens, nats"""
    num_verified: int

    @property
    def right(self) -> bool:
        """Whether the engines answered with the pushed weights, which were new ones."""
        near = max(self.before, self.after, self.trainer) <= BOUND
        return near and self.tokens and self.buckets and self.moved > 0.01 and self.num_verified > 0


def run(cases: Sequence[Case], root: Path, *, timeout_s: float = 3600.0) -> list[Result]:
    """Runs cases, those of a world size in one set of processes.

    Raises:
        RuntimeError: a rank failed; with what it printed.
        TimeoutError: a world took longer than `timeout_s` seconds.
    """
    make_inputs(root, sorted({case.model for case in cases}))
    for ranks in sorted({LAYOUTS[case.layout].ranks for case in cases}):
        mine = [case for case in sorted(cases) if LAYOUTS[case.layout].ranks == ranks]
        arguments = ["--rank-of", str(root), "--cases", *map(_as_argument, mine)]
        run_ranks(Path(__file__), arguments, ranks, len(mine), root, timeout_s)
    return [_judge(case, root) for case in sorted(cases)]


def _as_argument(case: Case) -> str:
    return json.dumps(dataclasses.asdict(case))


def _judge(case: Case, root: Path) -> Result:
    """A case's results against transformers."""
    from transformers import AutoModelForCausalLM

    ranks = [
        torch.load(root / f"{case.file}.{rank}.pt", weights_only=True)
        for rank in range(LAYOUTS[case.layout].ranks)
    ]
    before = AutoModelForCausalLM.from_pretrained(
        root / case.model / "trained", dtype=torch.float32
    ).eval()
    after = AutoModelForCausalLM.from_pretrained(
        root / case.model / "trained", dtype=torch.float32
    ).eval()
    _load_exported(after, ranks[0]["weights"], root / f"{case.file}.exported")
    right = {"before": before, "after": after}
    rows = [
        (which, right[which], answer)
        for rank in ranks
        for which in right
        for answer in rank["answers"][which]
    ]
    found = [(which, *_difference(model, *answer)) for which, model, answer in rows]
    return Result(
        case=case,
        before=max(difference for which, difference, _ in found if which == "before"),
        after=max(difference for which, difference, _ in found if which == "after"),
        trainer=max(rank["trainer_difference"] for rank in ranks),
        tokens=all(likeliest for *_, likeliest in found),
        buckets=all(all(rank["same"].values()) for rank in ranks),
        moved=max(_difference(before, *answer)[0] for which, _, answer in rows if which == "after"),
        num_verified=ranks[0]["num_verified"],
    )


def _load_exported(model: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Gives a model the exported weights, by transformers' own loader of a checkpoint."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    model.load_state_dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    )


@torch.inference_mode()
def _difference(
    model: Any, prompt: list[int], response: list[int], log_probs: list[float]
) -> tuple[float, bool]:
    """Largest difference of log-probs, and whether each token is the likeliest."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
    difference = (expected - torch.tensor(log_probs)).abs().max().item()
    return difference, logits.argmax(-1).tolist() == response


def markdown(results: Sequence[Result]) -> Iterator[str]:
    """The table's lines."""
    yield (
        "| model | training layout | `rollout.tp` | before the step | after it | trainer "
        "| greedy tokens equal | any bucket size |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for r in results:
        yield (
            f"| {r.case.model} | {LAYOUTS[r.case.layout].title} | {r.case.rollout_tp} | "
            f"{r.before:.1e} | {r.after:.1e} | {r.trainer:.1e} | {'yes' if r.tokens else 'NO'} | "
            f"{'yes' if r.buckets else 'NO'} |"
        )


def main() -> int:
    """Runs the table, or, as one of its ranks, a rank's part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=MODELS, help="models")
    parser.add_argument("--rollout-tp", nargs="*", type=int, default=[1, 2], choices=(1, 2))
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--write", type=Path, help="document whose table is replaced")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        cases = [Case(**json.loads(text)) for text in arguments.cases]
        work(arguments.rank_of, cases, arguments.ports)
        return 0
    wanted = [
        case
        for case in all_cases()
        if case.model in arguments.only
        and case.rollout_tp in arguments.rollout_tp
        and case.layout in arguments.layouts
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = run(wanted, Path(folder))
    lines = list(markdown(results))
    print("\n".join(lines))
    if arguments.write:
        write_table(arguments.write, lines, start=START, end=END)
    if arguments.json:
        rows = [dataclasses.asdict(result) | {"right": result.right} for result in results]
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(result.right for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
