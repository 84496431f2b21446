"""Pushes the trainer's weights to a server: over a process group, announced over HTTP.

A bucket of tensors of one dtype is packed end to end. Its names, dtypes and shapes are posted, and
while the server's processes wait for it, its bytes are broadcast to them; the answer to the post
then says whether each of them loaded it. Every check of `weight_update` holds here too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megappo.distributed.update_group import UpdateGroup, UpdateGroupFailed
from megappo.rollout.engine import EngineDied, EngineRefused, SyncReport
from megappo.rollout.server_checks import read_server_checksums
from megappo.rollout.server_client import ServerClient
from megappo.rollout.staging import require_finite
from megappo.rollout.sync_check import SyncWitness
from megappo.rollout.weight_update import checked_weights

_ARRIVAL_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 10.0
_LAST_WORDS_S = 5.0
"""A server that broke a group off is about to say why, or to be gone."""


class ServerLink:
    """The process group with one server, and the pushes that go over it."""

    def __init__(self, client: ServerClient, *, name: str, timeout_s: float) -> None:
        """Nothing is joined yet.

        Args:
            client: of the server.
            name: of the group; another run's has another.
            timeout_s: for one bucket.
        """
        self._client = client
        self._name = name
        self._timeout_s = timeout_s
        self._group: UpdateGroup | None = None

    def join(self, *, address: str, tp_size: int, device: str) -> None:
        """Builds the group.

        Args:
            address: of this host, as the server reaches it.
            tp_size: processes of the server.
            device: `cpu` (gloo) or `cuda` (NCCL).

        Raises:
            EngineRefused: the server's processes do not reach that address, or refuse.
            EngineDied: the server is gone.
        """
        backend = "nccl" if device == "cuda" else "gloo"
        posted: Future[Any] | None = None
        try:
            self._group = UpdateGroup(
                self._name,
                address=address,
                num_receivers=tp_size,
                backend=backend,
                timeout_s=self._timeout_s,
            )
            posted = self._post(
                "/init_weights_update_group",
                {
                    "master_address": address,
                    "master_port": self._group.port,
                    "rank_offset": 1,
                    "world_size": self._group.size,
                    "group_name": self._name,
                    "backend": backend,
                },
                "joining the group for weights",
                timeout_s=2 * _ARRIVAL_TIMEOUT_S,
            )
            self._group.join(arrival_timeout_s=_ARRIVAL_TIMEOUT_S, given_up=lambda: failed(posted))
        except UpdateGroupFailed as error:
            raise_cause(posted)
            raise EngineRefused(
                f"the server {self._client.url} got no group for weights: {error}; set "
                "rollout.sync_address to an address of this host that the server reaches, and "
                "start the server again if it waits for it"
            ) from error
        posted.result()

    def push(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        expected_names: Collection[str],
        dtype: torch.dtype,
        version: str,
        bucket_bytes: int,
        witness: SyncWitness | None,
        num_kv_heads: int,
        device: str,
    ) -> SyncReport:
        """Replaces the server's weights; arguments and errors as `weight_update.push_weights`.

        Args:
            named_tensors: Hugging Face names and whole tensors; read once, one bucket ahead.
            expected_names: the names that must come, each exactly once; a mapping to shapes has
                those compared too.
            dtype: of all of them.
            version: that the server's answers carry from now on.
            bucket_bytes: size at which a bucket is sent; a larger tensor goes alone.
            witness: compares what the server holds afterwards; None does not.
            num_kv_heads: of the model.
            device: of the server.
        """
        start = time.monotonic()
        num_tensors = num_bytes = num_verified = 0
        checked = checked_weights(named_tensors, expected_names, dtype)
        if witness is not None:
            checked = witness.watch(checked)
        staging = torch.empty(0, dtype=torch.uint8, device=device)
        with self._session():
            for bucket in buckets(checked, bucket_bytes):
                size = sum(tensor.nbytes for _, tensor in bucket)
                if staging.nbytes < size:
                    staging = staging.new_empty(max(size, bucket_bytes))
                self._send(bucket, pack(bucket, staging))
                num_tensors += len(bucket)
                num_bytes += size
        if witness is not None:
            ranks = read_server_checksums(self._client, witness.skipped, timeout_s=self._timeout_s)
            num_verified = witness.compare(ranks, num_kv_heads=num_kv_heads, device=device)
        self.set_version(version)
        return SyncReport(
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            seconds=time.monotonic() - start,
            num_verified=num_verified,
        )

    def set_version(self, version: str) -> None:
        """Sets the version that answers carry, and reads it back."""
        self._ask(
            "/update_weight_version",
            {"new_version": version, "abort_all_requests": False},
            "setting the weight version",
        )
        model = self._client.get("/model_info", timeout_s=self._timeout_s, what="telling a version")
        if model["weight_version"] != version:
            raise EngineRefused(
                f"weight version {version} was set, and the server {self._client.url} reports "
                f"{model['weight_version']}"
            )

    def close(self) -> None:
        """Leaves the group, and has the server leave it, which stays up. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            left = self._post(
                "/destroy_weights_update_group",
                {"group_name": self._name},
                "leaving the group for weights",
                timeout_s=_LEAVE_TIMEOUT_S,
            )
            group.close()
            left.exception()  # A server that is gone has left too.

    def _post(
        self, path: str, body: Any, what: str, *, timeout_s: float | None = None
    ) -> Future[Any]:
        """Posts on another thread: the server answers once this side has done its part."""
        limit_s = timeout_s or self._timeout_s
        return self._client.post_aside(path, body, timeout_s=limit_s, what=what)

    def _ask(self, path: str, body: Any, what: str) -> Any:
        return self._client.post(path, body, timeout_s=self._timeout_s, what=what)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """SGLang's bracket around an update; closed on an exception, so that another can open."""
        self._ask("/begin_weight_update", {}, "opening an update")
        try:
            yield
        except EngineDied:
            raise  # Nobody is left to close it, and trying would hide what happened.
        except BaseException:
            self._ask("/end_weight_update", {}, "closing an update")
            raise
        self._ask("/end_weight_update", {}, "closing an update")

    def _send(self, bucket: list[tuple[str, Tensor]], packed: Tensor) -> None:
        """One bucket; returns when every process of the server has loaded it."""
        assert self._group is not None, "join() comes first"
        posted = self._post(
            "/update_weights_from_distributed",
            {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._name,
                "load_format": "flattened_bucket",
                # Once at the end, with a check.
                "flush_cache": False,
            },
            f"loading {len(bucket)} weights from {bucket[0][0]} to {bucket[-1][0]}",
        )
        try:
            self._group.send(packed, given_up=lambda: failed(posted))
        except UpdateGroupFailed as error:
            raise_cause(posted)
            raise EngineDied(
                f"the server {self._client.url} did not take weights: {error}"
            ) from error
        posted.result()


def buckets(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups neighbours of one dtype; a bucket stays within `bucket_bytes` unless it is one."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named_tensors:
        other_dtype = bucket and bucket[0][1].dtype != tensor.dtype
        if other_dtype or (bucket and filled + tensor.nbytes > bucket_bytes):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach()))
        filled += tensor.nbytes
    if bucket:
        yield bucket


def pack(bucket: list[tuple[str, Tensor]], staging: Tensor) -> Tensor:
    """The bucket's tensors end to end, at the beginning of `staging`. [bytes] uint8.

    Raises:
        ValueError: an element is NaN or infinite; with the tensor's name.
    """
    sums: list[Tensor] = []
    start = 0
    for _, tensor in bucket:
        end = start + tensor.nbytes
        sums.append(staging[start:end].view(tensor.dtype).copy_(tensor.reshape(-1)).sum())
        start = end
    require_finite(bucket, sums)
    return staging[:start]


def failed(posted: Future[Any] | None) -> bool:
    """Whether a post has been answered with an error."""
    return posted is not None and posted.done() and posted.exception() is not None


def raise_cause(posted: Future[Any] | None) -> None:
    """Raises what the server answered, if it did: it says more than the broken group."""
    if posted is not None and wait([posted], timeout=_LAST_WORDS_S).done:
        posted.result()
