"""The layout that a checkpoint's files are cut for, and whether Megatron can split a model so.

Apart from `models.build.check_layout`, which is stricter: what this trainer runs is less than what
Megatron loads (more tensor-parallel ranks than key-value heads).
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.errors import ModelError
from megappo.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Layout:
    """For which ranks the files are cut."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Whether Megatron can split the model so.

        Raises:
            ModelError: with the first number that does not divide.
        """
        if min(self.tp, self.pp, self.ep) < 1:
            raise ModelError(f"--tp {self.tp}, --pp {self.pp} and --ep {self.ep} must be 1 or more")
        splits = [("query heads", spec.num_heads, self.tp, "--tp")]
        if spec.num_kv_heads > self.tp:
            splits.append(("key-value heads", spec.num_kv_heads, self.tp, "--tp"))
        else:  # Megatron gives several ranks the same head
            splits.append(("tensor-parallel ranks", self.tp, spec.num_kv_heads, "--tp"))
        if not all(spec.has_experts(layer) for layer in range(spec.num_layers)):
            splits.append(("MLP columns", spec.ffn_hidden_size, self.tp, "--tp"))
        if spec.num_experts:
            splits.append(("columns of an expert", spec.moe_ffn_hidden_size, self.tp, "--tp"))
            splits.append(("experts", spec.num_experts, self.ep, "--ep"))
        elif self.ep > 1:
            raise ModelError(f"--ep {self.ep}: this {spec.model_type} model has no experts")
        for what, count, parts, option in splits:
            if count % parts:
                raise ModelError(
                    f"{option} {getattr(self, option[2:])} does not fit the model: {count} {what} "
                    f"do not divide by {parts}"
                )
        if self.pp > spec.num_layers:
            raise ModelError(f"--pp {self.pp} is more than the model's {spec.num_layers} layers")
