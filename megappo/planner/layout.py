"""A layout as numbers, and how many micro-batches a pipeline stage holds at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megappo.config.layout import ParallelSection
from megappo.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks split one model. Ranks are numbered TP fastest, then CP, DP, PP."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    packed: bool = True
    fsdp: bool = False
    pipeline_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, section: ParallelSection, spec: ModelSpec, *, world_size: int) -> Layout:
        """The layout of a model: experts' degrees and uneven stages only where they apply to it."""
        wanted = tuple(section.pipeline_layers)
        return cls(
            tp=section.tp,
            pp=section.pp,
            vp=section.vpp,
            cp=section.cp,
            dp=world_size // (section.tp * section.pp * section.cp),
            ep=section.ep if spec.num_experts else 1,
            etp=section.expert_tp if spec.num_experts else section.tp,
            sequence_parallel=section.sequence_parallel and section.tp > 1,
            packed=section.packed,
            fsdp=section.fsdp,
            pipeline_layers=wanted if sum(wanted) == spec.num_layers else (),
        )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def grad_ranks(self) -> int:
        """Ranks that share out gradients and optimizer state of what is no expert: DP x CP."""
        return self.dp * self.cp

    @property
    def expert_grad_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return self.world_size // (self.pp * self.ep * self.etp)

    @property
    def token_split(self) -> int:
        """Parts into which sequence parallelism cuts the tokens between the matrices."""
        return self.tp if self.sequence_parallel else 1

    @property
    def name(self) -> str:
        """In words."""
        chunks = f" x VPP{self.vp}" if self.vp > 1 else ""
        experts = f", EP{self.ep} x ETP{self.etp}" if self.ep > 1 or self.etp != self.tp else ""
        sp = "+SP" if self.sequence_parallel else ""
        sharded = ", FSDP" if self.fsdp else ""
        return (
            f"TP{self.tp}{sp} x PP{self.pp}{chunks} x CP{self.cp} x DP{self.dp}{experts}{sharded}"
        )


@lru_cache(maxsize=4096)
def outstanding(*, pp: int, vp: int, rank: int, num_micro: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches whose activations a stage holds, a count for each chunk; each state once.

    1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2): stage r runs PP - r - 1 forward
    passes ahead. Interleaved: 2 (PP - r - 1) + (VPP - 1) PP of them (schedules.py:773), PP
    micro-batches at a time on each chunk, forward from the first and backward from the last.
    """
    total = num_micro * vp
    ahead = (pp - rank - 1) if vp == 1 else 2 * (pp - rank - 1) + (vp - 1) * pp
    ahead = min(ahead + 1, total)
    counts = [0] * vp
    for number in range(ahead):
        counts[number // pp % vp] += 1
    states = [tuple(counts)]
    for done in range(min(total - ahead, 2 * pp * vp)):
        counts[vp - 1 - done // pp % vp] -= 1
        counts[(ahead + done) // pp % vp] += 1
        states.append(tuple(counts))
    return tuple(dict.fromkeys(states))
