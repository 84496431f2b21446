"""What is planned: a config, its models and a world size, with the batch arithmetic of a rank.

Sequences are as long as the config allows: memory must suffice for that. For times a shorter mean
response may be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megappo.config import Config
from megappo.config.layout import MemorySection
from megappo.config.learning import ActorSection, CriticSection
from megappo.config.reward_model import RewardModelSection
from megappo.models.packing import Alignment, token_multiple
from megappo.models.spec import ModelSpec
from megappo.planner import memory
from megappo.planner.activations import Device, Kernels, peak_bytes
from megappo.planner.constants import FP8_COPY_BYTES, GPUS_PER_NODE
from megappo.planner.flops import Head
from megappo.planner.layout import Layout
from megappo.planner.memory import Static
from megappo.planner.parameters import Stage

HEADS: dict[str, Head] = {
    "actor": "lm",
    "critic": "value",
    "reference": "lm",
    "reward_model": "value",
}
FROZEN = ("reference", "reward_model")
"""Roles that are never updated."""


@dataclass(frozen=True, kw_only=True)
class Micro:
    """How a role cuts one mini-batch of a DP rank."""

    num_passes: int
    """Micro-batches."""
    tokens: float
    """Positions of the largest on one rank: S / CP."""
    mean_tokens: float
    """Positions of a usual one, for times."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, as far as its memory and time depend on it."""

    config: Config
    specs: Mapping[str, ModelSpec]
    """Of `actor` and, where they are used, `critic`, `reference` and `reward_model`."""
    world_size: int
    gpus_per_node: int = GPUS_PER_NODE
    device: Device = "cuda"
    mean_response: int = 0
    """Tokens of a usual response, for times; 0: the longest."""
    layouts: Mapping[str, Layout] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        section = self.config.parallel
        made = {
            role: Layout.of(section, spec, world_size=self.world_size)
            for role, spec in self.specs.items()
        }
        object.__setattr__(self, "layouts", made)

    @classmethod
    def of(
        cls,
        config: Config,
        specs: Mapping[str, ModelSpec],
        *,
        world_size: int,
        gpus_per_node: int = GPUS_PER_NODE,
        device: Device = "cuda",
        mean_response: int = 0,
    ) -> Job:
        """A job of those roles that the config uses."""
        unused = {
            "reference": not config.uses_reference,
            "critic": not config.uses_critic,
            "reward_model": not config.reward_model.path,
        }
        used = {role: spec for role, spec in specs.items() if not unused.get(role, False)}
        return cls(
            config=config,
            specs=used,
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            device=device,
            mean_response=mean_response,
        )

    @cached_property
    def layout(self) -> Layout:
        """The actor's."""
        return self.layouts["actor"]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.config.data.max_prompt_length + self.config.rollout.max_response_length

    @property
    def usual(self) -> int:
        """Tokens of a usual sample."""
        response = self.mean_response or self.config.rollout.max_response_length
        return self.config.data.max_prompt_length + response

    @property
    def context_length(self) -> int:
        """Most tokens that an engine must hold of one request."""
        rollout = self.config.rollout
        longest = max(rollout.max_response_length, rollout.val_response_length)
        return self.config.data.max_prompt_length + longest

    @property
    def samples(self) -> int:
        """Of a step, over all ranks."""
        return self.config.data.train_batch_size * self.config.rollout.n

    @property
    def generated(self) -> int:
        """Responses of a step: the samples, and greedy ones where a baseline is made of them."""
        greedy = self.config.algorithm.traits.uses_greedy_baseline
        return self.samples + greedy * self.config.data.train_batch_size

    @property
    def trained_roles(self) -> list[str]:
        """Roles that are updated, in the order of a step."""
        return [role for role in ("critic", "actor") if role in self.specs]

    @property
    def num_updates(self) -> int:
        """Optimizer steps of one model in a step."""
        actor, data = self.config.actor, self.config.data
        return data.train_batch_size // actor.mini_batch_size * actor.ppo_epochs

    @cached_property
    def kernels(self) -> Kernels:
        """What the trainer computes with."""
        return Kernels(
            dtype=self.config.model.dtype, device=self.device, mean_length=float(self.longest)
        )

    def settings(self, role: str) -> ActorSection | CriticSection | RewardModelSection:
        """What cuts a role's passes; the reference runs the actor's."""
        if role == "reward_model":
            return self.config.reward_model
        return self.trained(role)

    def trained(self, role: str) -> ActorSection | CriticSection:
        """The section of a role that is trained; the actor's of others."""
        return self.config.critic if role == "critic" else self.config.actor

    def keeps(self, role: str) -> MemorySection:
        """What stays on the device; frozen models recompute and train nothing."""
        if role == "reference":
            return MemorySection(param_offload=self.config.reference.param_offload)
        if role == "reward_model":
            return MemorySection(param_offload=self.config.reward_model.param_offload)
        return self.trained(role).memory

    def num_forwards(self, role: str) -> int:
        """How often a step runs the passes of `micro` forward, updates aside.

        The reward model cuts all samples of a step at once, the others a mini-batch.
        """
        if role == "reward_model":
            return 1
        return self.config.data.train_batch_size // self.config.actor.mini_batch_size

    @cached_property
    def _alignment(self) -> Alignment:
        layout, model = self.layout, self.config.model
        return Alignment(
            multiple_of=token_multiple(
                tp=layout.tp,
                sequence_parallel=layout.sequence_parallel,
                fp8_recipe=None if model.fp8 == "none" else model.fp8_recipe,
            ),
            cp=layout.cp,
            packed=layout.packed,
        )

    @cached_property
    def _micros(self) -> dict[str, Micro]:
        return {role: self._micro(role) for role in self.specs}

    @cached_property
    def _stages(self) -> dict[str, tuple[Stage, ...]]:
        return {
            role: memory.layout_stages(spec, self.layouts[role])
            for role, spec in self.specs.items()
        }

    @cached_property
    def _statics(self) -> dict[tuple[str, int], Static]:
        return {
            (role, rank): self._static(role, rank)
            for role in self.specs
            for rank in self.distinct_ranks
        }

    def micro(self, role: str) -> Micro:
        """How a mini-batch of one DP rank is cut into passes; of the reward model all samples."""
        return self._micros[role]

    def _micro(self, role: str) -> Micro:
        section, align, cp = self.settings(role), self._alignment, self.layout.cp
        samples = self.config.actor.mini_batch_size * self.config.rollout.n
        if role == "reward_model":
            samples = self.generated
        samples = max(samples // self.layout.dp, 1)
        row = align.row_multiple
        longest, usual = align.padded(self.longest), align.padded(self.usual)

        def positions(count: float, each: int) -> float:
            return -(-count * each // row) * row / cp

        if not section.use_dynamic_bsz:
            micro = min(section.micro_batch_size, samples)
            return Micro(
                num_passes=-(-samples // micro),
                tokens=positions(micro, longest),
                mean_tokens=positions(micro, usual),
            )
        budget = section.max_token_len_per_gpu * cp // row * row / cp
        fitting = max(1, int(budget * cp // usual))
        passes = -(-samples // fitting)
        if self.layout.vp > 1:
            passes = -(-passes // self.layout.pp) * self.layout.pp
        return Micro(
            num_passes=passes,
            tokens=min(budget, positions(samples, longest)),
            mean_tokens=positions(samples / passes, usual),
        )

    def stage(self, role: str, rank: int) -> Stage:
        """What a pipeline rank holds of a role."""
        return self._stages[role][rank]

    @cached_property
    def distinct_ranks(self) -> tuple[int, ...]:
        """The first pipeline rank of each kind; a later one of its kind holds and does no more."""
        first: dict[tuple[Stage, ...], int] = {}
        for rank in range(self.layout.pp):
            first.setdefault(tuple(self.stage(role, rank) for role in self.specs), rank)
        return tuple(first.values())

    def static(self, role: str, rank: int) -> Static:
        """Weights, gradients and optimizer state of a role on a pipeline rank."""
        return self._statics.get((role, rank)) or self._static(role, rank)

    def _static(self, role: str, rank: int) -> Static:
        spec, layout, dtype = self.specs[role], self.layouts[role], self.config.model.dtype
        stage = self.stage(role, rank)
        if role in FROZEN:
            return memory.frozen(spec, layout, stage, dtype=dtype, head=HEADS[role])
        return memory.trained(spec, layout, stage, dtype=dtype, head=HEADS[role])

    def fp8_copies(self, role: str, rank: int) -> float:
        """Bytes of the weights' fp8 forms while a role runs."""
        if self.config.model.fp8 == "none":
            return 0.0
        spec, layout = self.specs[role], self.layouts[role]
        found = memory.stage_elements(spec, layout, self.stage(role, rank), HEADS[role])
        return float(FP8_COPY_BYTES * sum(e.total for e in found))

    def activations(self, role: str, rank: int) -> float:
        """Most bytes that an update of a role holds for backward passes on a pipeline rank."""
        micro = self.micro(role)
        return micro.tokens * peak_bytes(
            self.specs[role],
            self.layouts[role],
            self.kernels,
            self.stage(role, rank),
            rank=rank,
            num_micro=micro.num_passes,
            recompute=self.keeps(role).recompute,
            head=HEADS[role],
        )
