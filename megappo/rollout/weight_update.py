"""Pushes the trainer's weights into SGLang, some at a time, with every answer checked.

Tensors are packed into memory that is shared with the engine's processes (`staging`), bucket by
bucket: memory and file descriptors stay constant however large the model is. There are two places
for a bucket. While the engine loads one, the next is gathered and packed into the other. SGLang
copies a bucket into its parameters before it answers, so its place is free again then.

SGLang skips names that it does not know and reports success, dies of a wrong shape, and casts a
wrong dtype without a word. So names, shapes and dtypes are compared here with those that the caller
expects, each name exactly once, and a tensor that is not finite is not sent. What was loaded is
counted where SGLang has said so, so that no bucket is lost on its way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.rollout.engine import EngineDied, EngineRefused, SyncReport
from megappo.rollout.sglang_process import SGLangProcess
from megappo.rollout.staging import Slot, Staging, pack, padded
from megappo.rollout.sync_check import SyncWitness, read_checksums

_IN_FLOAT32 = ".e_score_correction_bias"
"""Names of routers' biases end so; models and SGLang hold them in float32 whatever their dtype."""


def push_weights(
    process: SGLangProcess,
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    expected_names: Collection[str],
    dtype: torch.dtype,
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
        expected_names: the names that must come, each exactly once; a mapping to shapes has those
            compared too.
        dtype: of all of them.
        version: that completions report from now on.
        bucket_bytes: size at which a bucket is sent; a larger tensor goes alone.
        tp_size: processes that load the weights, each its part.
        staging: of this engine.
        witness: compares what the engine holds afterwards; None does not.
        device: of the engine.
        timeout_s: for each request to the engine.

    Raises:
        ValueError: a name is unknown, missing or comes twice, or its tensor is not finite or has
            another shape or dtype.
        EngineRefused: SGLang refused or did not get a bucket, reports another version, or holds
            something else.
        EngineDied: the engine's processes are gone.
    """
    start = time.monotonic()
    push = _Push(
        process,
        staging=staging,
        tp_size=tp_size,
        timeout_s=timeout_s,
        keeps_mapped=device == "cpu",
    )
    checked = checked_weights(named_tensors, expected_names, dtype)
    if witness is not None:
        checked = witness.watch(checked)
    try:
        with push.session():
            for bucket in _buckets(checked, bucket_bytes):
                push.send(bucket)
    finally:
        staging.end_push()
    if push.num_tensors != len(expected_names):
        raise EngineRefused(
            f"SGLang loaded {push.num_tensors} of {len(expected_names)} weights: a bucket was lost "
            "on its way"
        )
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
    named_tensors: Iterable[tuple[str, Tensor]],
    expected_names: Collection[str],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Passes tensors on; raises ValueError at a wrong name, shape or dtype, or if some are missing.

    Args:
        named_tensors: Hugging Face names and whole tensors.
        expected_names: each comes once; a mapping to shapes has those compared too.
        dtype: of all but what a model holds in float32 whatever its dtype.
    """
    shapes = expected_names if isinstance(expected_names, Mapping) else {}
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
        if name in shapes and tuple(tensor.shape) != tuple(shapes[name]):
            raise ValueError(
                f"weight {name!r} has shape {list(tensor.shape)}, and the engine needs "
                f"{list(shapes[name])}: correct the export of its family"
            )
        if tensor.dtype != (torch.float32 if name.endswith(_IN_FLOAT32) else dtype):
            raise ValueError(
                f"weight {name!r} is {tensor.dtype}, and the engine holds {dtype}, to which it "
                "would cast without a word: export the model's dtype"
            )
        missing.remove(name)
        yield name, tensor
    if missing:
        first = ", ".join(sorted(missing)[:3])
        raise ValueError(
            f"{len(missing)} of {len(known)} weights were not pushed, among them {first}: "
            "export every weight of the checkpoint"
        )


def _buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups tensors in order; a bucket stays within `bucket_bytes` unless it is one tensor."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named_tensors:
        size = padded(tensor.nbytes)
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach()))
        filled += size
    if bucket:
        yield bucket


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A request that the engine has not answered yet, as far as we know."""

    answer: Future[tuple[bool, str]]
    what: str
    slot: Slot | None
    """That the engine's processes read until they answer."""
    num_tensors: int
    num_bytes: int


class _Push:
    """One push: its requests to the engine."""

    def __init__(
        self,
        process: SGLangProcess,
        *,
        staging: Staging,
        tp_size: int,
        timeout_s: float,
        keeps_mapped: bool,
    ) -> None:
        self._process = process
        self._tp_size = tp_size
        self._timeout_s = timeout_s
        self._staging = staging
        self._keeps_mapped = keeps_mapped
        self._sent: deque[_Sent] = deque()
        self._num_buckets = 0
        self.num_tensors = 0
        self.num_bytes = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """SGLang's bracket around an update; closed on an exception, so that another can open."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        # Packing the first bucket does not wait for the answer.
        self._submit(
            self._process.manager.begin_weight_update(BeginWeightUpdateReqInput(), None),
            "opening an update",
        )
        try:
            yield
            self._settle(0)
        except EngineDied:
            raise  # Nobody is left to close it, and trying would hide where the engine died.
        except BaseException as error:
            self._submit_close()
            answers = [self._answer(sent) for sent in self._sent]
            success, message = answers[-1]
            if not success:
                error.add_note(f"SGLang refused to close the update: {message}")
            raise
        self._submit_close()
        self._settle(0)

    def send(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Packs one bucket and sends it, while the engine may still load the one before."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        self._settle(1)
        slot = self._staging.slot(self._num_buckets)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=self._payload(bucket, slot),
            load_format="flattened_bucket",
            # Once at the end, by the caller, with a time-out and a check.
            flush_cache=False,
        )
        self._submit(
            self._process.manager.update_weights_from_tensor(request, None),
            f"loading {len(bucket)} weights from {bucket[0][0]} to {bucket[-1][0]}",
            slot=slot,
            num_tensors=len(bucket),
            num_bytes=sum(tensor.nbytes for _, tensor in bucket),
        )
        self._num_buckets += 1

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

    def _submit_close(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._submit(
            self._process.manager.end_weight_update(EndWeightUpdateReqInput(), None),
            "closing an update",
        )

    def _submit(
        self,
        request: Coroutine[Any, Any, tuple[bool, str]],
        what: str,
        *,
        slot: Slot | None = None,
        num_tensors: int = 0,
        num_bytes: int = 0,
    ) -> None:
        self._sent.append(
            _Sent(
                answer=self._process.submit(request, what=what),
                what=what,
                slot=slot,
                num_tensors=num_tensors,
                num_bytes=num_bytes,
            )
        )

    def _settle(self, most: int) -> None:
        """Waits until at most so many requests have no answer; raises EngineRefused at a no."""
        while len(self._sent) > most:
            sent = self._sent.popleft()
            success, message = self._answer(sent)
            if not success:
                raise EngineRefused(f"SGLang refused {sent.what}: {message}")
            self.num_tensors += sent.num_tensors
            self.num_bytes += sent.num_bytes
            if sent.slot is not None:
                # `sglang_staging`, which SGLang on CUDA goes without, keeps it mapped.
                sent.slot.mapped = self._keeps_mapped

    def _answer(self, sent: _Sent) -> tuple[bool, str]:
        return self._process.wait(sent.answer, timeout_s=self._timeout_s, what=sent.what)

    def _payload(self, bucket: list[tuple[str, Tensor]], slot: Slot) -> list[bytes]:
        """The bucket as SGLang's flattened form, serialised for each process."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        total = sum(padded(tensor.nbytes) for _, tensor in bucket)
        buffer = slot.at_least(total, device=bucket[0][1].device)
        metadata = [
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start)
            for (name, tensor), (start, end) in zip(bucket, pack(bucket, buffer), strict=True)
        ]
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        content = {
            "flattened_tensor": None if slot.mapped else buffer,
            "slot": slot.number,
            "metadata": metadata,
        }
        if slot.mapped:
            return [MultiprocessingSerializer.serialize(content)] * self._tp_size
        return [MultiprocessingSerializer.serialize(content) for _ in range(self._tp_size)]
