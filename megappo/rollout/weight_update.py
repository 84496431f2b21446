"""Pushes the trainer's weights into SGLang, some at a time, with every answer checked.

Tensors are packed into one staging buffer that is shared with the engine's processes and filled
anew for each bucket: memory and file descriptors stay constant however large the model is. SGLang
copies a bucket into its parameters before it answers, so the buffer is free again then. In host
memory it stays for the next push, because touching new pages costs several times the copy itself.

SGLang skips names that it does not know and reports success. So the names are compared here with
those that the caller expects, each exactly once, and a tensor that is not finite is not sent.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megappo.rollout.engine import EngineDied, EngineRefused, SyncReport
from megappo.rollout.sglang_process import SGLangProcess
from megappo.rollout.sync_check import SyncWitness, read_checksums

_ALIGNMENT = 16
"""Bytes; a tensor of any dtype may start at a multiple."""


class Staging:
    """Memory that this process fills and the engine's processes read."""

    def __init__(self) -> None:
        """Holds nothing until the first push."""
        self._buffer: Tensor | None = None

    def at_least(self, num_bytes: int, *, device: torch.device) -> Tensor:
        """A shared buffer of at least this size: the one before, if it suffices. [>= n] uint8."""
        buffer = self._buffer
        if buffer is None or buffer.nbytes < num_bytes or buffer.device != device:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            if device.type == "cuda":
                from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

                # Names devices by UUID: the engine's processes may number them differently.
                monkey_patch_torch_reductions()
            else:
                buffer.share_memory_()
            self._buffer = buffer
        return buffer

    def end_push(self) -> None:
        """Frees device memory, which the trainer needs; keeps host memory."""
        if self._buffer is not None and self._buffer.is_cuda:
            self._buffer = None


def push_weights(
    process: SGLangProcess,
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    expected_names: Collection[str],
    version: int,
    bucket_bytes: int,
    tp_size: int,
    staging: Staging,
    witness: SyncWitness | None,
    device: str,
    timeout_s: float,
) -> SyncReport:
    """Replaces the engine's weights.

    Args:
        process: the engine.
        named_tensors: Hugging Face names and whole tensors; read once, one bucket ahead.
        expected_names: the names that must come, each exactly once.
        version: that completions report from now on.
        bucket_bytes: size at which a bucket is sent; a larger tensor goes alone.
        tp_size: processes that load the weights, each its part.
        staging: of this engine.
        witness: compares what the engine holds afterwards; None does not.
        device: of the engine.
        timeout_s: for each request to the engine.

    Raises:
        ValueError: a name is unknown, missing or comes twice, or its tensor is not finite.
        EngineRefused: SGLang refused a bucket, reports another version, or holds something else.
        EngineDied: the engine's processes are gone.
    """
    start = time.monotonic()
    push = _Push(process, staging=staging, tp_size=tp_size, timeout_s=timeout_s)
    checked = checked_weights(named_tensors, expected_names)
    if witness is not None:
        checked = witness.watch(checked)
    try:
        with push.session():
            for bucket in _buckets(checked, bucket_bytes):
                push.send(bucket)
    finally:
        staging.end_push()
    num_verified = 0
    if witness is not None:
        num_verified = witness.compare(
            read_checksums(process, witness.skipped, timeout_s=timeout_s),
            num_kv_heads=process.manager.model_config.get_total_num_kv_heads(),
            device=device,
        )
    push.set_version(version)
    return SyncReport(
        num_tensors=push.num_tensors,
        num_bytes=push.num_bytes,
        seconds=time.monotonic() - start,
        num_verified=num_verified,
    )


def checked_weights(
    named_tensors: Iterable[tuple[str, Tensor]], expected_names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Passes tensors on; raises ValueError at a wrong name or content, or when some are missing."""
    missing = set(expected_names)
    known = frozenset(missing)
    for name, tensor in named_tensors:
        if name not in known:
            raise ValueError(
                f"the engine knows no weight {name!r}, it would skip it without a word: correct "
                "the model family's map of names"
            )
        if name not in missing:
            raise ValueError(f"weight {name!r} was pushed twice: export each name once")
        _require_finite(name, tensor)
        missing.remove(name)
        yield name, tensor
    if missing:
        first = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{len(missing)} of {len(known)} weights were not pushed, among them {first}: "
            "export every weight of the checkpoint"
        )


def _require_finite(name: str, tensor: Tensor) -> None:
    """Raises ValueError if an element is NaN or infinite."""
    # A sum reads once and writes nothing; only one that overflows needs the second look.
    if tensor.sum().isfinite() or tensor.isfinite().all():
        return
    count = int((~tensor.isfinite()).sum())
    raise ValueError(
        f"weight {name!r} has {count} of {tensor.numel()} elements that are NaN or infinite, and "
        "was not sent: training has diverged; lower the learning rate, or resume before this step"
    )


def _buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups tensors in order; a bucket stays within `bucket_bytes` unless it is one tensor."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named_tensors:
        size = _padded(tensor.nbytes)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach()))
        filled += size
    if bucket:
        yield bucket


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Push:
    """One push: its requests to the engine."""

    def __init__(
        self, process: SGLangProcess, *, staging: Staging, tp_size: int, timeout_s: float
    ) -> None:
        self._process = process
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._staging = staging
        self.num_tensors = 0
        self.num_bytes = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """SGLang's bracket around an update; closed on an exception, so that another can open."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        manager = self._process.manager
        self._request(
            manager.begin_weight_update(BeginWeightUpdateReqInput(), None), "opening an update"
        )
        close = partial(manager.end_weight_update, EndWeightUpdateReqInput(), None)
        try:
            yield
        except EngineDied:
            raise  # Nobody is left to close it, and trying would hide where the engine died.
        except BaseException:
            self._request(close(), "closing an update")
            raise
        self._request(close(), "closing an update")

    def send(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Packs one bucket and waits until every process has loaded it."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        payload = self._payload(bucket)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payload,
            load_format="flattened_bucket",
            # Once at the end, by the caller, with a time-out and a check.
            flush_cache=False,
        )
        self._request(
            self._process.manager.update_weights_from_tensor(request, None),
            f"loading {len(bucket)} weights from {bucket[0][0]} to {bucket[-1][0]}",
        )
        self.num_tensors += len(bucket)
        self.num_bytes += sum(tensor.nbytes for _, tensor in bucket)

    def set_version(self, version: int) -> None:
        """Sets the version in every process and reads it back."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        manager = self._process.manager
        self._process.call(
            manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version))),
            timeout_s=self._timeout_s,
            what="setting the weight version",
        )
        reported = manager.config_value("weight_version")
        if reported != str(version):
            raise EngineRefused(f"weight version {version} was set, and SGLang reports {reported}")

    def _request(self, request: Any, what: str) -> None:
        success, message = self._process.call(request, timeout_s=self._timeout_s, what=what)
        if not success:
            raise EngineRefused(f"SGLang refused {what}: {message}")

    def _payload(self, bucket: list[tuple[str, Tensor]]) -> list[bytes]:
        """The bucket as SGLang's flattened form, serialised for each process."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        total = sum(_padded(tensor.nbytes) for _, tensor in bucket)
        staging = self._staging.at_least(total, device=bucket[0][1].device)
        metadata = []
        start = 0
        for name, tensor in bucket:
            end = start + tensor.nbytes
            staging[start:end].view(tensor.dtype).copy_(tensor.reshape(-1))
            metadata.append(
                FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.nbytes)
            )
            start += _padded(tensor.nbytes)
        if staging.is_cuda:
            torch.cuda.synchronize(staging.device)
        content = {"flattened_tensor": staging, "metadata": metadata}
        return [MultiprocessingSerializer.serialize(content) for _ in range(self._tp_size)]
