"""Trains actor and critic in every layout on gloo ranks, and compares each with one rank.

    python tools/parallel_table.py                              # prints the table
    python tools/parallel_table.py --write docs/parallelism.md  # and puts it into the document
    python tools/parallel_table.py --only tp2 cp2_dp2 --json table.json

Each layout runs three optimizer steps of both models on the same samples: uneven lengths, holes in
the masks, one sample without a trained token, entropy and KL terms, weight decay, clipping. What is
compared: loss and gradient norm of every step, and every parameter after the last. Exit code 1 if
a layout is out of bounds.

One process a rank serves all layouts of its world size, one after another: importing costs more
than training here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megappo.types import Completion, Prompt, RolloutBatch, collate  # noqa: E402

NORM_BOUND = 1e-5
"""Largest relative difference of a gradient norm."""
PARAMETER_BOUND = 1e-5
"""Largest difference of a parameter over the tensor's largest value."""
LOSS_BOUND = 1e-5
"""Largest difference of a loss or fraction over its own largest value in the run."""
LOSS_FLOOR = 0.05
"""That value counts as at least so much: a KL near 0 is a difference of larger numbers."""

PROMPTS, SAMPLES_A_PROMPT, MINI_BATCH = 12, 2, 4
STEPS = PROMPTS // MINI_BATCH
VOCAB = 131
"""Odd, so that TP pads it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the table."""

    title: str
    ranks: int
    overrides: tuple[str, ...] = ()
    models: str = "dense"
    """Which models and which loss: the name of the one-rank run that it is compared with."""
    empty_passes: int = 0
    """Forward passes without a sample that are added to every mini-batch."""


TP2, SP, PP2 = "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.pp=2"
CP2, EP2 = "parallel.cp=2", "parallel.ep=2"
MICRO_1 = ("actor.micro_batch_size=1", "critic.micro_batch_size=1")
MICRO_4 = ("actor.micro_batch_size=4", "critic.micro_batch_size=4")
DYNAMIC = (
    "actor.use_dynamic_bsz=true",
    "actor.max_token_len_per_gpu=70",
    "critic.use_dynamic_bsz=true",
    "critic.max_token_len_per_gpu=64",
)
PADDED = ("parallel.packed=false",)
RECOMPUTE = ("actor.memory.recompute=full", "critic.memory.recompute=selective")

LAYOUTS: dict[str, Layout] = {
    "micro1": Layout(title="one rank, micro-batches of 1", ranks=1, overrides=MICRO_1),
    "micro4": Layout(title="one rank, micro-batches of 4", ranks=1, overrides=MICRO_4),
    "dynamic": Layout(title="one rank, token budget", ranks=1, overrides=DYNAMIC),
    "padded": Layout(title="one rank, padded", ranks=1, overrides=PADDED),
    "recompute": Layout(title="one rank, recompute full / selective", ranks=1, overrides=RECOMPUTE),
    "tp2": Layout(title="TP2", ranks=2, overrides=(TP2,)),
    "tp2_sp": Layout(title="TP2 + SP", ranks=2, overrides=(TP2, SP)),
    "tp2_sp_padded": Layout(title="TP2 + SP, padded", ranks=2, overrides=(TP2, SP, *PADDED)),
    "tp2_sp_recompute": Layout(
        title="TP2 + SP, recompute full / selective", ranks=2, overrides=(TP2, SP, *RECOMPUTE)
    ),
    "pp2": Layout(title="PP2", ranks=2, overrides=(PP2,)),
    "pp2_uneven": Layout(
        title="PP2, 1 + 4 layers", ranks=2, overrides=(PP2, "parallel.pipeline_layers=[1,4]")
    ),
    "pp2_vp2": Layout(title="PP2 x VPP2", ranks=2, overrides=(PP2, "parallel.vpp=2")),
    "pp2_vp2_dynamic": Layout(
        title="PP2 x VPP2, token budget", ranks=2, overrides=(PP2, "parallel.vpp=2", *DYNAMIC)
    ),
    "cp2": Layout(title="CP2", ranks=2, overrides=(CP2,)),
    "cp2_padded": Layout(title="CP2, padded", ranks=2, overrides=(CP2, *PADDED)),
    "cp2_dynamic": Layout(title="CP2, token budget", ranks=2, overrides=(CP2, *DYNAMIC)),
    "dp2": Layout(title="DP2", ranks=2),
    "dp2_micro1": Layout(title="DP2, micro-batches of 1", ranks=2, overrides=MICRO_1),
    "dp2_dynamic": Layout(title="DP2, token budget", ranks=2, overrides=DYNAMIC),
    "dp2_overlap": Layout(
        title="DP2, both overlaps",
        ranks=2,
        overrides=("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
    ),
    "dp2_empty": Layout(title="DP2, two empty passes", ranks=2, empty_passes=2),
    "cp2_empty": Layout(title="CP2, an empty pass", ranks=2, overrides=(CP2,), empty_passes=1),
    "tp2_dp2": Layout(title="TP2 x DP2", ranks=4, overrides=(TP2,)),
    "tp2_pp2": Layout(title="TP2 x PP2", ranks=4, overrides=(TP2, PP2)),
    "tp2_sp_pp2": Layout(title="TP2 + SP x PP2", ranks=4, overrides=(TP2, SP, PP2)),
    "pp2_dp2": Layout(title="PP2 x DP2", ranks=4, overrides=(PP2,)),
    "pp4": Layout(title="PP4, uneven", ranks=4, overrides=("parallel.pp=4",)),
    "cp2_dp2": Layout(title="CP2 x DP2", ranks=4, overrides=(CP2,)),
    "cp2_pp2": Layout(title="CP2 x PP2", ranks=4, overrides=(CP2, PP2)),
    "tp2_sp_cp2": Layout(title="TP2 + SP x CP2", ranks=4, overrides=(TP2, SP, CP2)),
    "cp4": Layout(title="CP4", ranks=4, overrides=("parallel.cp=4",)),
    "dp4_dynamic": Layout(title="DP4, token budget", ranks=4, overrides=DYNAMIC),
    "tp2_sp_pp2_empty": Layout(
        title="TP2 + SP x PP2, an empty pass", ranks=4, overrides=(TP2, SP, PP2), empty_passes=1
    ),
    "seq_dynamic": Layout(
        title="one rank, token budget", ranks=1, overrides=DYNAMIC, models="dense, seq-mean"
    ),
    "seq_dp2": Layout(title="DP2", ranks=2, models="dense, seq-mean"),
    "seq_cp2": Layout(title="CP2", ranks=2, overrides=(CP2,), models="dense, seq-mean"),
    "seq_cp2_dp2": Layout(
        title="CP2 x DP2, token budget",
        ranks=4,
        overrides=(CP2, *DYNAMIC),
        models="dense, seq-mean",
    ),
    "moe_micro1": Layout(
        title="one rank, micro-batches of 1", ranks=1, overrides=MICRO_1, models="moe"
    ),
    "moe_dynamic": Layout(title="one rank, token budget", ranks=1, overrides=DYNAMIC, models="moe"),
    "moe_ep2": Layout(title="EP2 (over DP2)", ranks=2, overrides=(EP2,), models="moe"),
    "moe_ep2_empty": Layout(
        title="EP2, an empty pass", ranks=2, overrides=(EP2,), models="moe", empty_passes=1
    ),
    "moe_dp2": Layout(title="DP2", ranks=2, models="moe"),
    "moe_cp2": Layout(title="CP2", ranks=2, overrides=(CP2,), models="moe"),
    "moe_tp2_sp": Layout(title="TP2 + SP, ETP2", ranks=2, overrides=(TP2, SP), models="moe"),
    "moe_tp2_sp_ep2": Layout(
        title="TP2 + SP, EP2 x ETP1",
        ranks=2,
        overrides=(TP2, SP, EP2, "parallel.etp=1"),
        models="moe",
    ),
    "moe_pp2": Layout(title="PP2", ranks=2, overrides=(PP2,), models="moe"),
    "moe_ep2_dp2": Layout(title="EP2 x DP2", ranks=4, overrides=(EP2,), models="moe"),
    "moe_pp2_ep2": Layout(title="PP2 x EP2", ranks=4, overrides=(PP2, EP2), models="moe"),
    "moe_cp2_ep2": Layout(
        title="CP2 x DP2, EP2, token budget", ranks=4, overrides=(CP2, EP2, *DYNAMIC), models="moe"
    ),
    "moe_tp2_sp_ep2_etp2": Layout(
        title="TP2 + SP x DP2, EP2 x ETP2", ranks=4, overrides=(TP2, SP, EP2), models="moe"
    ),
}

MODELS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "dense, seq-mean": (
        "actor.loss_agg_mode=seq-mean-token-mean",
        "critic.loss_agg_mode=seq-mean-token-sum",
    ),
    "moe": ("actor.moe_aux_loss_coeff=0.02", "critic.moe_aux_loss_coeff=0.01"),
}

CONFIG = """\
device: cpu
model: {{path: "{actor}", dtype: float32}}
data: {{train_files: [none.parquet], val_files: [none.parquet], train_batch_size: {prompts},
  max_prompt_length: 24}}
rollout: {{n: {n}, temperature: 1.3, max_response_length: 32}}
actor:
  optim: {{lr: 3.0e-3, eps: 1.0e-3, weight_decay: 0.1, clip_grad: 0.5, lr_warmup_steps: 1,
    lr_decay_style: cosine}}
  entropy_coeff: 0.01
  kl_loss_coef: 0.05
  mini_batch_size: {mini}
  micro_batch_size: 2
critic:
  path: "{critic}"
  optim: {{lr: 2.0e-3, eps: 1.0e-3}}
  micro_batch_size: 2
reference: {{path: "{reference}"}}
trainer: {{run_dir: "{root}/run"}}
"""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MOE: dict[str, Any] = COMMON | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
FOLDERS: dict[str, dict[str, Any]] = {
    "dense_actor": COMMON | {"model_type": "qwen2", "tie_word_embeddings": True},
    # Another family, width and depth than the actor: all roles share the groups alone.
    "dense_critic": COMMON
    | {"model_type": "llama", "hidden_size": 48, "num_hidden_layers": 6, "head_dim": 12},
    "moe_actor": MOE,
    "moe_critic": MOE | {"num_experts": 8, "num_hidden_layers": 5},
}


def make_inputs(root: Path) -> None:
    """Random models as Hugging Face folders, and a config for each kind."""
    for seed, (name, settings) in enumerate(FOLDERS.items()):
        save_model(root / name, settings, seed)
    for kind in ("dense", "moe"):
        save_model(root / f"{kind}_reference", FOLDERS[f"{kind}_actor"], seed=17)
        roles = {role: str(root / f"{kind}_{role}") for role in ("actor", "critic", "reference")}
        text = CONFIG.format(
            root=root, prompts=PROMPTS, n=SAMPLES_A_PROMPT, mini=MINI_BATCH, **roles
        )
        (root / f"{kind}.yaml").write_text(text)


def save_model(folder: Path, settings: Mapping[str, Any], seed: int) -> None:
    """Writes a random model whose logits spread, with a tokenizer that knows nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


# What follows runs on every rank.


def work(root: Path, names: Sequence[str], ports: Sequence[int]) -> None:
    """Runs layouts one after another on this rank and writes `<name>.<rank>.pt` for each."""
    for name, port in zip(names, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        layout = all_layouts()[name]
        kind = layout.models.partition(",")[0]
        overrides = [*MODELS[layout.models], *layout.overrides]
        found = train(root / f"{kind}.yaml", overrides, empty_passes=layout.empty_passes)
        torch.save(found, root / f"{name}.{os.environ['RANK']}.pt")


def train(config_path: Path, overrides: Sequence[str], *, empty_passes: int = 0) -> dict[str, Any]:
    """Three optimizer steps of actor and critic in one layout; what came out on this rank."""
    from megappo.config import load
    from megappo.distributed import parallel
    from megappo.models.spec import load_spec
    from megappo.trainer.build import build_roles, make_planner
    from megappo.trainer.micro_batches import as_mini_batches, as_passes
    from megappo.trainer.preflight import model_paths

    config = load(config_path, overrides)
    launch = parallel.LaunchEnvironment.read()
    degrees = parallel.Degrees.of(config.parallel)
    context = parallel.start(launch, degrees, device="cpu", seed=1, timeout_s=120)
    specs = {role: load_spec(path) for role, path in model_paths(config).items()}
    actor, critic, reference = build_roles(config, specs, context, total_optimizer_steps=STEPS + 2)
    assert reference is not None
    batch = _share(whole_batch(), context)
    size = MINI_BATCH * SAMPLES_A_PROMPT // context.dp
    actor_plan = make_planner(config.actor, actor.policy.network, size).plan(batch.total_lengths)
    critic_plan = make_planner(config.critic, critic.network, size).plan(batch.total_lengths)
    for plan in (actor_plan, critic_plan):
        for mini in plan:
            mini.extend([] for _ in range(empty_passes))
    old, entropy = actor.log_probs(batch, as_passes(actor_plan, size))
    ref, _ = reference.log_probs(batch, as_passes(actor_plan, size))
    values, after = critic.values(batch, as_passes(critic_plan, size))
    batch = batch.with_fields(
        # Off the current policy a little, so that ratios and clips take part.
        old_log_probs=old + 0.1 * torch.sin(torch.arange(old.shape[1])),
        ref_log_probs=ref,
        values=values + _wave(batch, 1.0),
        advantages=_wave(batch, 2.0),
        returns=_wave(batch, 3.0),
    )
    found = _update(
        actor,
        critic,
        as_mini_batches(batch, actor_plan, size),
        as_mini_batches(batch, critic_plan, size),
        context,
        gathers_late=config.parallel.overlap_param_gather,
    )
    found |= {
        "before": {"old": old, "entropy": entropy, "ref": ref, "values": values, "after": after},
        "rows": [p.row * SAMPLES_A_PROMPT + int(p.ground_truth) for p in batch.prompts],
        "micro_batches": [len(mini) for plan in (actor_plan, critic_plan) for mini in plan],
        "longest_pass": {
            "actor": _longest(actor.policy.network, as_mini_batches(batch, actor_plan, size)),
            "critic": _longest(critic.network, as_mini_batches(batch, critic_plan, size)),
        },
        "optimizer_bytes": _optimizer_bytes(actor) + _optimizer_bytes(critic),
        "degrees": dataclasses.asdict(degrees) | {"dp": context.dp},
    }
    parallel.stop(context)
    return found


def _longest(network: Any, minis: Sequence[Any]) -> int:
    """Most positions of a forward pass on this rank."""
    cuts = [cut for mini in minis for cut in network.cut(mini.samples, mini.micro_batches)]
    return max(cut.num_tokens for cut in cuts)


def _update(
    actor: Any,
    critic: Any,
    actor_minis: Sequence[Any],
    critic_minis: Sequence[Any],
    context: Any,
    *,
    gathers_late: bool,
) -> dict[str, Any]:
    """The optimizer steps, with what each of them must leave equal between ranks.

    With `gathers_late` weights are whole only after the last: between steps the next forward pass
    gathers them, as in training.
    """
    from megappo.distributed.metrics import Tally, reduce_tally
    from megappo.models.hf_export import export_hf

    losses, norms, saved = [], [], []
    names = (*actor.means, *critic.means)
    tied, copies = True, True
    for number, (actor_mini, critic_mini) in enumerate(
        zip(actor_minis, critic_minis, strict=True), start=1
    ):
        settle = not gathers_late or number == STEPS
        tally = Tally()
        tally.declare(names, (*actor.MAXIMA, *critic.MAXIMA))
        norms.append(critic.update(critic_mini, tally, settle=settle))
        norms.append(actor.update(actor_mini, tally, is_first=False, settle=settle))
        metrics = reduce_tally(tally, context)
        losses += [metrics[name] for name in names]
        saved.append(metrics["perf/activations_gb/actor"])
        for role in (actor, critic) if settle else ():
            copies &= _copies_have_equal_gradients(role.trainable.chunks, context)
            tied &= _tied_weights_are_equal(role.trainable.chunks)
    weights = {}
    for prefix, network, head in (
        ("actor.", actor.policy.network, "lm"),
        ("critic.", critic.network, "value"),
    ):
        exported = export_hf(network.chunks, network.spec, head=head)
        weights |= {prefix + name: tensor.clone() for name, tensor in exported}
    return {
        "losses": losses,
        "loss_names": names,
        "norms": norms,
        "weights": weights,
        "tied": tied,
        "copies": copies,
        "activations_gb": saved,
    }


def _copies_have_equal_gradients(chunks: Sequence[Any], context: Any) -> bool:
    """Whether parameters that all TP ranks hold (norms, routers) have one gradient, bit for bit.

    Looked at where no other ranks share the gradient buffers: else each holds a part of the sum.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    group = ps.get_tensor_model_parallel_group()
    if group.size() == 1 or context.dp * context.cp > 1:
        return True
    equal = True
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False) or ".experts." in name:
                continue
            gradients = [torch.empty_like(parameter.main_grad) for _ in range(group.size())]
            dist.all_gather(gradients, parameter.main_grad, group=group)
            equal &= all(torch.equal(gradients[0], g) for g in gradients)
    return equal


def _tied_weights_are_equal(chunks: Sequence[Any]) -> bool:
    """Whether the embedding on the first and on the last stage are one, bit for bit."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    bare = [chunk.module for chunk in chunks]
    group = ps.get_embedding_group(check_initialized=False)  # none on stages in between
    if not bare[0].share_embeddings_and_output_weights or group is None:
        return True
    first = ps.get_pipeline_model_parallel_rank() == 0
    weight = bare[0 if first else -1].shared_embedding_or_output_weight()
    both = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(both, weight.detach(), group=group)
    return all(torch.equal(both[0], w) for w in both)


def _optimizer_bytes(role: Any) -> int:
    """Adam's moments on this rank."""
    optimizer = role.trainable.optimizer
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return sum(
        tensor.numel() * tensor.element_size()
        for part in parts
        for state in part.optimizer.state.values()
        for tensor in state.values()
        if torch.is_tensor(tensor) and tensor.ndim
    )


def whole_batch() -> RolloutBatch:
    """Samples of all ranks: uneven, one without a trained token, some with gaps in the mask."""
    generator = torch.Generator().manual_seed(5)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, VOCAB, (length,), generator=generator).tolist())

    prompts, completions = [], []
    for row in range(PROMPTS):
        prompt_ids = ids(1, 24)
        for k in range(SAMPLES_A_PROMPT):
            prompts.append(
                Prompt(
                    row=row,
                    token_ids=prompt_ids,
                    data_source="",
                    ground_truth=str(k),
                    extra_info={},
                )
            )
            tokens = ids(1, 30)
            completions.append(
                Completion(
                    token_ids=tokens, log_probs=(-1.0,) * len(tokens), finish_reason="stop", text=""
                )
            )
    batch = collate(prompts, completions)
    mask = batch.response_mask.clone()
    mask[3] = False
    mask[::4, 2:5] = False
    return dataclasses.replace(batch, response_mask=mask)


def _share(batch: RolloutBatch, context: Any) -> RolloutBatch:
    """This DP rank's samples, prompt by prompt as training deals them; DP4 takes half prompts."""
    per_rank = MINI_BATCH * SAMPLES_A_PROMPT // context.dp
    size = MINI_BATCH * SAMPLES_A_PROMPT
    starts = range(context.dp_rank * per_rank, len(batch), size)
    return batch.select([i for start in starts for i in range(start, start + per_rank)])


def _wave(batch: RolloutBatch, phase: float) -> torch.Tensor:
    """[B, T] numbers that depend on sample and token alone."""
    samples = torch.tensor([p.row * SAMPLES_A_PROMPT + int(p.ground_truth) for p in batch.prompts])
    return torch.sin(phase + samples[:, None] * 1.7 + torch.arange(batch.responses.shape[1]) * 0.9)


# What follows runs in the process that starts the ranks.


def all_layouts() -> dict[str, Layout]:
    """The table's layouts, after the one-rank runs that they are compared with."""
    baselines = {
        f"one rank: {models}": Layout(title="one rank", ranks=1, models=models) for models in MODELS
    }
    return {**baselines, **LAYOUTS}


def run(names: Sequence[str], root: Path, *, timeout_s: float = 900.0) -> dict[str, list[Any]]:
    """Results of all ranks by layout, the needed one-rank runs included.

    Raises:
        RuntimeError: a rank failed; with what it printed.
        TimeoutError: a world size took longer than `timeout_s` seconds.
    """
    layouts = all_layouts()
    needed = {f"one rank: {layouts[name].models}" for name in names}
    wanted = [name for name in layouts if name in needed or name in names]
    make_inputs(root)
    for ranks in sorted({layouts[name].ranks for name in wanted}):
        mine = [name for name in wanted if layouts[name].ranks == ranks]
        arguments = ["--rank-of", str(root), "--only", *mine]
        run_ranks(Path(__file__), arguments, ranks, len(mine), root, timeout_s)
    return {
        name: [
            torch.load(root / f"{name}.{rank}.pt", weights_only=True)
            for rank in range(layouts[name].ranks)
        ]
        for name in wanted
    }


def run_ranks(
    script: Path, arguments: Sequence[str], ranks: int, num_ports: int, root: Path, timeout_s: float
) -> None:
    """Runs a script once a rank, with `--ports` for as many groups of processes.

    Raises:
        RuntimeError: a rank failed; with what it printed.
        TimeoutError: they took longer than `timeout_s` seconds.
    """
    ports = [str(port) for port in _free_ports(num_ports)]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(script), *arguments, "--ports", *ports]
    logs = [root / f"world{ranks}.rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = _wait(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        shown = "\n".join(f"--- rank {r}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs))
        raise RuntimeError(f"a world of {ranks} ranks failed ({codes}):\n{shown}")


def _free_ports(count: int) -> list[int]:
    """Ports below those that connections get by themselves: they must stay free for a while.

    Engines take theirs further down.
    """
    found: list[int] = []
    candidates = random.sample(range(22_000, 32_000), 40 * count)
    while len(found) < count:
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", candidates[-1]))
                found.append(candidates[-1])
            except OSError:  # somebody has it
                pass
        candidates.pop()
    return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes when all have ended or one has failed (None: still running)."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return codes
        time.sleep(0.05)
    raise TimeoutError(f"the ranks were not done after {timeout_s} s")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a layout is from one rank: the worst of its ranks."""

    name: str
    loss: float
    norm: float
    parameters: float
    equal_ranks: bool
    """weights bit-equal on all ranks, tied embeddings and copies' gradients too"""

    @property
    def within_bounds(self) -> bool:
        """Whether the layout computes the same as one rank."""
        return (
            self.loss <= LOSS_BOUND
            and self.norm <= NORM_BOUND
            and self.parameters <= PARAMETER_BOUND
            and self.equal_ranks
        )


def compare(results: Mapping[str, Sequence[Any]]) -> list[Comparison]:
    """Every layout of `run` against its one-rank run."""
    layouts = all_layouts()
    return [
        _compare_one(name, ranks, results[f"one rank: {layouts[name].models}"][0])
        for name, ranks in results.items()
        if name in LAYOUTS
    ]


def _compare_one(name: str, ranks: Sequence[Any], alone: Any) -> Comparison:
    count = len(alone["loss_names"])
    largest = [max(map(abs, alone["losses"][i::count])) for i in range(count)]
    return Comparison(
        name=name,
        loss=max(
            abs(a - b) / max(largest[i % count], LOSS_FLOOR)
            for rank in ranks
            for i, (a, b) in enumerate(zip(rank["losses"], alone["losses"], strict=True))
        ),
        norm=max(
            abs(a - b) / b
            for rank in ranks
            for a, b in zip(rank["norms"], alone["norms"], strict=True)
        ),
        parameters=max(
            _difference(rank["weights"][key], expected)
            for rank in ranks
            for key, expected in alone["weights"].items()
        ),
        equal_ranks=all(
            rank["tied"]
            and rank["copies"]
            and rank["weights"].keys() == alone["weights"].keys()
            and all(torch.equal(w, ranks[0]["weights"][k]) for k, w in rank["weights"].items())
            for rank in ranks
        ),
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def markdown(rows: Sequence[Comparison]) -> Iterator[str]:
    """The table's lines."""
    yield "| models | layout | ranks | loss | gradient norm | parameters | ranks equal |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        layout = LAYOUTS[row.name]
        yield (
            f"| {layout.models} | {layout.title} | {layout.ranks} | {row.loss:.1e} | "
            f"{row.norm:.1e} | {row.parameters:.1e} | {'yes' if row.equal_ranks else 'NO'} |"
        )


START, END = "<!-- table: tools/parallel_table.py -->", "<!-- end of table -->"


def write_table(document: Path, lines: Sequence[str], *, start: str, end: str) -> None:
    """Replaces the table between two marks of a document."""
    head, rest = document.read_text().split(start)
    _, tail = rest.split(end)
    document.write_text(head + start + "\n\n" + "\n".join(lines) + "\n\n" + end + tail)


def main() -> int:
    """Runs the table, or, as one of its ranks, a rank's part of it."""
    parser = argparse.ArgumentParser(description="compares every parallel layout with one rank")
    parser.add_argument("--only", nargs="*", default=list(LAYOUTS), help="names of layouts")
    parser.add_argument("--write", type=Path, help="document whose table is replaced")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ports", nargs="*", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        work(arguments.rank_of, arguments.only, arguments.ports)
        return 0
    unknown = sorted(set(arguments.only) - set(LAYOUTS))
    if unknown:
        parser.error(f"unknown layouts {', '.join(unknown)}; known: {', '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(run(arguments.only, Path(folder)))
    lines = list(markdown(rows))
    print("\n".join(lines))
    if arguments.write:
        write_table(arguments.write, lines, start=START, end=END)
    if arguments.json:
        arguments.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0 if all(row.within_bounds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
