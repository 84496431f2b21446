"""Proves that a push arrived: what the engine holds is compared with what was sent, bit by bit.

Chosen are the weights outside the layers (embedding, last norm, head) and, of each kind of layer
(dense, with experts), the last one with all of its weights: each name there stands for the same
name in the layers like it, which went the same way. Copies are taken while they are sent. SGLang's
weight checker then hashes its own parameters, on every process of the engine, and the copies are
put together as that process should hold them and hashed alike.

How SGLang holds a Hugging Face tensor, for the families that we know, with T processes:

    q_proj, k_proj, v_proj        qkv_proj: rows of each, 1/T, below each other; a key-value head is
                                  repeated where there are fewer heads than processes
    gate_proj, up_proj            gate_up_proj: rows of each, 1/T
    experts.E.gate_proj, up_proj  experts.w13_weight [E, ..]: as gate_up_proj; Mixtral's w1, w3
    experts.E.down_proj           experts.w2_weight [E, ..]: columns, 1/T; Mixtral's w2
    o_proj, down_proj             columns, 1/T
    embed_tokens, lm_head         rows, padded with zeros to a multiple of 64 a process, 1/T; a tied
                                  head is the embedding
    all others                    whole, on every process; a router perhaps in float32

Left out: weights that an engine repacks (quantised, or shuffled for a kernel); they would differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megappo.rollout.engine import EngineRefused
from megappo.rollout.sglang_process import SGLangProcess

_LAYER = re.compile(r"\blayers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip
_FUSED_ORDER = (*_FUSED, "w1", "w3")
_MLP_OUTPUTS = ("down_proj.weight", "w2_weight")
_BY_WORDS = ("embed_tokens.weight", "lm_head.weight")
_WORDS_MULTIPLE = 64
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class SyncWitness:
    """Copies of the chosen tensors of one push, and what they say about the engine afterwards."""

    def __init__(self, names: Collection[str]) -> None:
        """Chooses among Hugging Face names; the same names give the same choice."""
        layers: dict[int, list[str]] = defaultdict(list)
        for name in names:
            if found := _LAYER.search(name):
                layers[int(found[1])].append(re.sub(r"\d+", "N", found[2]))
        last = {tuple(sorted(kinds)): number for number, kinds in sorted(layers.items())}
        self.skipped = [f"layers.{n}." for n in sorted(layers.keys() - set(last.values()))]
        """Parts of names; what has one is not compared."""
        self._copies: dict[str, Tensor] = {}

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes tensors on and copies the chosen ones to host memory."""
        for name, tensor in named_tensors:
            if not any(skipped in name for skipped in self.skipped):
                self._copies[name] = tensor.detach().to("cpu", copy=True)
            yield name, tensor

    def compare(self, ranks: Sequence[Mapping[str, str]], *, num_kv_heads: int, device: str) -> int:
        """Compares with the engine's checksums and returns how many names were compared.

        Args:
            ranks: each process's checksums after the push, from `in_rank_order`.
            num_kv_heads: of the model.
            device: of the engine; hashes of `cuda` and `cpu` are not the same.

        Raises:
            EngineRefused: a weight is not what was sent, or has no counterpart; with its name.
        """
        sources = _sources(self._copies)
        for rank, found in enumerate(ranks):
            if _HEAD in found and _HEAD not in sources:
                sources[_HEAD] = sources[_EMBEDDING]
            _require_same_names(found, sources, rank=rank)
            for parameter, names in sources.items():
                shard = engine_shard(
                    [(name, self._copies[name].to(device)) for name in names],
                    rank=rank,
                    tp_size=len(ranks),
                    num_kv_heads=num_kv_heads,
                )
                # SGLang holds GLM-4.5's routers in float32 in any case; the cast loses nothing.
                if found[parameter] not in (_checksum(shard), _checksum(shard.float())):
                    raise EngineRefused(
                        f"weight {', '.join(names[:3])} was sent, and process {rank} of the engine "
                        f"holds something else in {parameter}: the engine is not used with it. "
                        "If this engine repacks its weights, set rollout.verify_sync=never"
                    )
        return len(self._copies)


def read_checksums(
    process: SGLangProcess, skipped: Sequence[str], *, timeout_s: float
) -> list[Mapping[str, str]]:
    """Each process's parameter names and checksums, without names that have a part of `skipped`.

    Raises:
        EngineRefused: SGLang gives none.
        EngineDied: the engine's processes are gone.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    request = CheckWeightsReqInput(action="checksum", skip_tensor_list=list(skipped))
    success, message, ranks, _ = process.call(
        process.manager.check_weights(request, None),
        timeout_s=timeout_s,
        what="reading checksums of its weights",
    )
    if not success or not ranks:
        raise EngineRefused(f"SGLang gave no checksums of its weights: {message}")
    return in_rank_order(ranks)


def in_rank_order(ranks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, str]]:
    """The checksums of SGLang's weight checker, in the order of its processes."""
    ordered = sorted(ranks, key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
    return [rank["checksums"] for rank in ordered]


def engine_name(name: str) -> str:
    """The parameter of SGLang that a Hugging Face tensor is a part of."""
    if found := _EXPERT.fullmatch(name):
        return f"{found[1]}.{'w2' if found[3] in ('down_proj', 'w2') else 'w13'}_weight"
    *path, module, kind = name.split(".")
    return ".".join([*path, _FUSED.get(module, module), kind])


def engine_shard(
    parts: Sequence[tuple[str, Tensor]],
    *,
    rank: int,
    tp_size: int,
    num_kv_heads: int,
) -> Tensor:
    """One SGLang parameter as one process holds it, experts one below the other; see the table.

    Args:
        parts: the Hugging Face tensors that make it up, in the order in which they are stacked.
        rank: number of the process.
        tp_size: processes of the engine.
        num_kv_heads: of the model.
    """
    name, tensors = engine_name(parts[0][0]), [tensor for _, tensor in parts]
    if ".qkv_proj." in name:
        q, *kv = tensors
        copies = max(1, tp_size // num_kv_heads)
        heads = [_slice(x, rank // copies, tp_size // copies) for x in kv]
        return torch.cat([_slice(q, rank, tp_size), *heads])
    if ".gate_up_proj." in name or name.endswith("w13_weight"):
        return torch.cat([_slice(x, rank, tp_size) for x in tensors])
    if name.endswith(_MLP_OUTPUTS):
        return torch.cat([_slice(x, rank, tp_size, dim=1) for x in tensors])
    (whole,) = tensors
    if name.endswith("o_proj.weight"):
        return _slice(whole, rank, tp_size, dim=1)
    if name.endswith(_BY_WORDS):
        return _slice(_padded_words(whole, tp_size), rank, tp_size)
    return whole


def _slice(x: Tensor, number: int, count: int, *, dim: int = 0) -> Tensor:
    size = x.shape[dim] // count
    return x.narrow(dim, number * size, size)


def _padded_words(x: Tensor, tp_size: int) -> Tensor:
    """Rows of zeros below, as many as SGLang's `VocabParallelEmbedding` adds."""
    multiple = _WORDS_MULTIPLE
    if -(-len(x) // multiple) * multiple % tp_size:
        multiple *= tp_size
    return torch.cat([x, x.new_zeros(-len(x) % multiple, *x.shape[1:])])


def _checksum(tensor: Tensor) -> str:
    """SGLang's own hash, as its weight checker writes it."""
    from sglang.srt.managers.mm_utils import tensor_hash

    return f"{tensor_hash(tensor):016x}"


def _sources(names: Iterable[str]) -> dict[str, list[str]]:
    """SGLang's parameter -> the Hugging Face tensors in it, in the order of their rows."""
    sources: dict[str, list[str]] = defaultdict(list)
    for name in names:
        sources[engine_name(name)].append(name)
    return {engine: sorted(parts, key=_order) for engine, parts in sources.items()}


def _order(name: str) -> tuple[int, int]:
    """Expert, then place in the fused parameter."""
    expert = _EXPERT.fullmatch(name)
    module = name.split(".")[-2]
    place = _FUSED_ORDER.index(module) if module in _FUSED_ORDER else 0
    return (int(expert[2]) if expert else 0), place


def missing_and_unknown(engine: Collection[str], names: Iterable[str]) -> tuple[set[str], set[str]]:
    """SGLang parameters that an engine lacks, and those of its own that have no source.

    Args:
        engine: its parameters.
        names: Hugging Face names of the model that it should hold.
    """
    wanted = set(_sources(names))
    return wanted - set(engine), set(engine) - wanted - {_HEAD}


def _require_same_names(engine: Collection[str], sent: Collection[str], *, rank: int) -> None:
    """Raises EngineRefused if a chosen parameter was not sent, or has no place in the engine."""
    for what, names in (
        ("was not sent, and the engine has it", set(engine) - set(sent)),
        ("was sent, and the engine does not have it", set(sent) - set(engine)),
    ):
        if names:
            raise EngineRefused(
                f"weight {min(names)} {what} (process {rank}): correct the model family's map of "
                "names, or, if this engine repacks its weights, set rollout.verify_sync=never"
            )
