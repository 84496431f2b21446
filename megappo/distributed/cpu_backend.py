"""Makes Megatron-Core train on CPU tensors over gloo, which it does not support by itself.

Call `install("cpu")` once, before the first import of `megatron.core`. Three mechanisms, each
confined as far as it can be: (1) the `torch.cuda` functions that Megatron calls without asking
become CPU ones; (2) the constants "cuda" and "torch.cuda.*Tensor" are changed inside
`megatron.core` modules alone, while they are imported; (3) a handful of Megatron's functions and
classes is replaced. `torch.cuda.is_available()` keeps answering False, so that other libraries in
the process, SGLang among them, still choose their CPU paths.

Left out: fused kernels, CUDA graphs, CPU offloading, FP8. Line numbers are those of megatron-core
0.16.1, the only version accepted, because all of this touches internals.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from megappo.errors import UserError

TESTED_MEGATRON = "0.16.1"


def install(device: str) -> None:
    """Prepares this process for Megatron on `device`; calling it again does nothing.

    Args:
        device: `cpu`, or `cuda`, for which nothing is changed.

    Raises:
        UserError: the device is unknown, CUDA is visible to a CPU run, or megatron-core is missing
            or another version than the tested one.
        RuntimeError: `megatron.core` was imported before.
    """
    if device not in ("cpu", "cuda"):
        raise UserError(f"device must be 'cpu' or 'cuda', not {device!r}")
    if device == "cuda" or any(isinstance(f, _RetargetingFinder) for f in sys.meta_path):
        return
    _check_cuda_is_hidden()
    check_version()
    _check_not_imported()
    _patch_device_functions()
    _patch_rng_functions()
    _patch_streams()
    sys.meta_path.insert(0, _RetargetingFinder())
    _import_without_compiling()
    _patch_rng_tracker()
    _patch_norm()
    _patch_rope()
    _patch_latent_attention()
    _patch_moe()
    _patch_adam()


def _check_cuda_is_hidden() -> None:
    if torch.cuda.is_available():
        raise UserError(
            "device is 'cpu' but this process sees a CUDA device, which SGLang and Megatron would "
            "then use in part; set CUDA_VISIBLE_DEVICES='' or device 'cuda'"
        )


def check_version() -> None:
    """Refuses a megatron-core other than the tested one.

    Raises:
        UserError: it is missing, or another version.
    """
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"megatron-core is not installed; run `pip install megatron-core=={TESTED_MEGATRON}`"
        ) from error
    if found != TESTED_MEGATRON:
        raise UserError(
            "training on CPU changes internals of Megatron-Core and is tested with "
            f"{TESTED_MEGATRON} only, found {found}; "
            f"run `pip install megatron-core=={TESTED_MEGATRON}`"
        )


def _check_not_imported() -> None:
    early = next((name for name in sys.modules if name.startswith("megatron.core")), None)
    if early is not None:
        raise RuntimeError(
            f"cpu_backend.install must run before Megatron is imported, but {early} is loaded "
            "already; call it first thing in the entry module"
        )


def _patch_device_functions() -> None:
    # parallel_state.py:933 and p2p_communication.py:242 synchronize; p2p_communication.py:190,
    # param_and_grad_buffer.py:783 and mappings.py:91 allocate on current_device(); optimizer.py:362
    # empties the cache; language_module.py:244 and distrib_optimizer.py:1089 call Tensor.cuda().
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _patch_rng_functions() -> None:
    # tensor_parallel/random.py:55, 235, 237 and 422 seed the CUDA generator and read its state.
    def get_state(*args: object, **kwargs: object) -> Tensor:
        return torch.get_rng_state()

    def set_state(new_state: Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for namespace in (torch.cuda, torch.cuda.random):
        namespace.get_rng_state = get_state
        namespace.set_rng_state = set_state
        namespace.manual_seed = manual_seed


class _Stream:
    """Stands for `torch.cuda.Stream`; a class, since others annotate with `Stream | None`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return hash(_Stream)

    def wait_stream(self, stream: object) -> None:
        """Work on a CPU has been done by the time it returns."""

    def wait_event(self, event: object) -> None:
        """As `wait_stream`."""

    def synchronize(self) -> None:
        """As `wait_stream`."""

    def record_event(self, event: _Event | None = None) -> _Event:
        """An event that has already happened."""
        return event or _Event()


class _Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        """The event happens at once."""

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True


def _patch_streams() -> None:
    # distributed_data_parallel.py:230 makes a stream, param_and_grad_buffer.py:417-422 and :529
    # enter it and wait for it; token_dispatcher.py:445 and :871-874 compare and enter streams.
    stream = _Stream()
    torch.cuda.current_stream = lambda *args: stream
    torch.cuda.default_stream = lambda *args: stream
    torch.cuda.stream = lambda *args: contextlib.nullcontext()
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event


def retarget(code: CodeType) -> CodeType:
    """The same code, nested code too, with CUDA device and tensor-type constants made CPU ones."""
    constants = tuple(_retarget_constant(c) for c in code.co_consts)
    if all(new is old for new, old in zip(constants, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=constants)


def _retarget_constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return retarget(constant)
    if isinstance(constant, tuple):
        parts = tuple(_retarget_constant(part) for part in constant)
        same = all(new is old for new, old in zip(parts, constant, strict=True))
        return constant if same else parts
    if isinstance(constant, str):
        if constant == "cuda":
            return "cpu"
        if constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
    return constant


class _RetargetingFinder(importlib.abc.MetaPathFinder):
    """Changes the constants of every `megatron.core` module as it is imported.

    Needed by schedules.py:596 (`device="cuda"`), clip_grads.py:90 and :167, optimizer.py:473 and
    :690, distrib_optimizer.py:361 and :420 (`param.type() == 'torch.cuda.FloatTensor'`), and
    layers.py:68 (`custom_fwd`).
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            loader = _RetargetingLoader(spec.loader.name, spec.loader.path)
            spec.loader = loader
        return spec


class _RetargetingLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else retarget(code)


_PATCHED_MODULES = (
    "megatron.core",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.torch_norm",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.optimizer",
    "megatron.core.models.gpt.gpt_layer_specs",
)


def _import_without_compiling() -> None:
    # jit.py:21 binds torch.compile as the decorator of each fused activation; on a CPU the first
    # call of one would spend about 16 s in the compiler. The warnings about missing Transformer
    # Engine and Apex announce the fallbacks that are replaced below.
    def identity(function: Callable[..., Any], **kwargs: object) -> Callable[..., Any]:
        return function

    compile_before = torch.compile
    torch.compile = identity
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not")
            for name in _PATCHED_MODULES:
                importlib.import_module(name)
    finally:
        torch.compile = compile_before


def _patch_rng_tracker() -> None:
    # tensor_parallel/random.py:41 and :72 reach into CUDA generators; :265 warns whenever the CPU
    # generator moves inside a fork, which is the purpose of a fork here.
    from megatron.core.tensor_parallel import random

    def set_state(new_state: Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def get_state(device: object = "cpu", clone: bool = False, graph_safe: bool = False) -> Tensor:
        return torch.get_rng_state()

    random._set_cuda_rng_state = set_state
    random._get_cuda_rng_state = get_state
    logging.getLogger(random.__name__).addFilter(
        lambda record: record.getMessage() != "CPU RNG state changed within GPU RNG context"
    )


def _patch_norm() -> None:
    # torch_norm.py:33 refuses sequence parallelism, though all it takes is a mark on the
    # parameters: by it finalize_model_grads.py:354 sums their gradients over the TP ranks.
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def new(
        cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: object
    ) -> torch.nn.Module:
        kinds = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}
        assert not config.layernorm_zero_centered_gamma, "torch norms have no zero-centred gamma"
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = new


def _patch_rope() -> None:
    # rope_utils.py:62 asks for pinned memory, which takes a CUDA device, to pick the two chunks of
    # a context-parallel rank out of unpacked positions; rotary_pos_embedding.py:20 has the name.
    from megatron.core.models.common.embeddings import rope_utils, rotary_pos_embedding

    def on_this_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
        chunks = pos_emb.chunk(2 * cp_group.size(), dim=seq_dim)
        early, late = cp_group.rank(), 2 * cp_group.size() - 1 - cp_group.rank()
        return torch.cat([chunks[early], chunks[late]], dim=seq_dim)

    rope_utils.get_pos_emb_on_this_cp_rank = on_this_rank
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = on_this_rank


def _patch_latent_attention() -> None:
    # multi_latent_attention.py:49 takes importable names for a sign of Transformer Engine, though
    # they are mocks without it; :185 then asks whether a layer is an instance of one.
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


def _patch_moe() -> None:
    # moe_utils.py:1192 reads te_general_gemm, which :34 binds only where Transformer Engine is.
    # token_dispatcher.py:876-892 needs numpy split sizes, which moe_utils.py:1093 makes from CUDA
    # tensors only.
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None
    moe_utils.maybe_move_tensor_to_cpu = move_to_cpu
    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
    _patch_uneven_collectives()


def _patch_uneven_collectives() -> None:
    # token_dispatcher.py:696 gathers an expert's tokens over its tensor-parallel ranks, which have
    # unequal counts of them; NCCL takes that (mappings.py:150, :189) and gloo does not. Here every
    # share is padded to the longest.
    from megatron.core.tensor_parallel import mappings

    even_gather = mappings._gather_along_first_dim
    even_reduce_scatter = mappings._reduce_scatter_along_first_dim

    def gather(
        input_: Tensor, group: Any, sizes: Sequence[int] | None = None, use_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            gathered: Tensor = even_gather(input_, group, None, use_buffer)
            return gathered
        counts = [int(n) for n in sizes]
        longest = max(1, *counts)
        shares = even_gather(_pad_rows(input_, longest), group).split(longest)
        return torch.cat([share[:n] for share, n in zip(shares, counts, strict=True)])

    def reduce_scatter(
        input_: Tensor, group: Any, sizes: Sequence[int] | None = None, use_buffer: bool = False
    ) -> Tensor:
        if sizes is None or group.size() == 1:
            scattered: Tensor = even_reduce_scatter(input_, group, None, use_buffer)
            return scattered
        counts = [int(n) for n in sizes]
        longest = max(1, *counts)
        padded = torch.cat([_pad_rows(share, longest) for share in input_.split(counts)])
        mine: Tensor = even_reduce_scatter(padded, group)[: counts[group.rank()]]
        return mine

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _pad_rows(rows: Tensor, count: int) -> Tensor:
    """`rows` with zeros below, `count` in all."""
    return torch.cat([rows, rows.new_zeros((count - len(rows), *rows.shape[1:]))])


class AdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW with the fused one's state layout: `step` in the parameter group, not with the moments.

    Loshchilov and Hutter 2019, algorithm 2; equal bit for bit to `torch.optim.AdamW` on one tensor.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay, times `lr`; with `adam_w_mode=False` added to the gradient.
        adam_w_mode: As named by Megatron's optimizer factory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        self.adam_w_mode = adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """One update of every parameter that has a gradient; empty groups keep their step count."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in _with_gradient(group["params"]):
                self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        lr, decay, step = group["lr"], group["weight_decay"], group["step"]
        if self.adam_w_mode:
            parameter.mul_(1 - lr * decay)
        elif decay:
            grad = grad.add(parameter, alpha=decay)
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = math.sqrt(1 - beta2**step)
        denominator = (state["exp_avg_sq"].sqrt() / root).add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-lr / (1 - beta1**step))


def _with_gradient(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    return (p for p in parameters if p.grad is not None and p.numel() > 0)


def _patch_adam() -> None:
    # Without Apex or Transformer Engine Megatron takes torch's AdamW, and its checkpoints break:
    # distrib_optimizer.py:642 asserts before the first step, :940 finds no tensor named 'step', and
    # :824 gives all parameters one shared step tensor, which then advances once a parameter.
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = AdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
