"""Whether a server is the one that a run needs: found out before anything is built.

A server was started by somebody else, so each thing that would make its answers wrong, or end a
run at its first push, is asked for: key, SGLang's version, model, vocabulary, names of weights,
type, context, and whether it draws by the seeds that it is given. The same is asked again when a
server comes back after a failure.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.rollout.engine import EngineFailure, EngineGone, EngineRefused
from megappo.rollout.server_client import ServerClient
from megappo.rollout.sglang_answers import body_of, seed_probe
from megappo.rollout.sglang_settings import CONTEXT_RESERVE
from megappo.rollout.sync_check import in_rank_order, missing_and_unknown

OLDEST_SGLANG = (0, 5, 21)
"""The first one with `begin_weight_update`."""

_HEALTH_TIMEOUT_S = 30.0
"""SGLang itself gives up after 20 s and answers 503."""
_HEALTH_POLL_S = 0.5
_CALL_TIMEOUT_S = 120.0

_NEEDED_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "dp_size": (1, "leave --dp-size out, and start a server for each replica"),
    "pp_size": (1, "leave --pp-size out: weights go to tensor-parallel processes alone"),
    "quantization": (None, "leave --quantization out: weights must be held as they are sent"),
    "speculative_algorithm": (None, "leave --speculative-algorithm out: it is not proved right"),
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WantedModel:
    """What a server must serve."""

    model_type: str
    """As in `config.json`."""
    vocab_size: int
    num_kv_heads: int
    weight_names: frozenset[str]
    """Every tensor in Hugging Face names."""
    context_length: int
    """Most tokens of one prompt and its response together."""
    dtype: str
    device: str
    """`cpu` or `cuda`."""
    uses_stop_strings: bool
    uses_min_p: bool


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server that fits is like."""

    url: str
    version: str
    tp_size: int
    honours_seeds: bool
    """Whether equal seeds give equal responses; else a run cannot be repeated."""

    def line(self) -> str:
        """For the screen."""
        seeds = (
            "honours seeds"
            if self.honours_seeds
            else "ignores seeds, so this run's numbers cannot be repeated (on CUDA start it with "
            "--enable-deterministic-inference)"
        )
        return f"{self.url}: SGLang {self.version}, TP {self.tp_size}, {seeds}"


def inspect_server(client: ServerClient, wanted: WantedModel, *, wait_s: float) -> ServerFacts:
    """Waits until a server is healthy and checks that it is the right one.

    Args:
        client: of the server.
        wanted: what it must serve.
        wait_s: how long it may take to be healthy.

    Raises:
        EngineGone: it was not healthy in time, or serves something else; with the remedy.
        EngineFailure: it failed while it was asked.
    """
    wait_until_healthy(client, wait_s=wait_s)
    model = client.get("/model_info", timeout_s=_CALL_TIMEOUT_S, what="describing its model")
    server = client.get("/server_info", timeout_s=_CALL_TIMEOUT_S, what="describing itself")
    if not isinstance(model, dict) or not isinstance(server, dict):
        raise EngineGone(f"the server {client.url} is no SGLang server: correct rollout.url")
    problems = [
        *_version_problems(server),
        *_model_problems(model, wanted),
        *_argument_problems(server, wanted),
    ]
    if not problems:
        problems = _weight_problems(client, wanted) + _vocabulary_problems(client, wanted)
    if problems:
        raise EngineGone(f"the server {client.url} cannot serve this run: " + "; ".join(problems))
    return ServerFacts(
        url=client.url,
        version=server["version"],
        tp_size=server["tp_size"],
        honours_seeds=_honours_seeds(client, wanted.context_length),
    )


def wait_until_healthy(client: ServerClient, *, wait_s: float) -> None:
    """Raises EngineGone if the server was not healthy within `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            client.get("/health", timeout_s=_HEALTH_TIMEOUT_S, what="saying whether it is healthy")
            return
        except EngineFailure as error:
            if time.monotonic() > deadline:
                raise EngineGone(
                    f"the server {client.url} was not healthy within rollout.server_wait_s "
                    f"{wait_s:g} s: start it (python -m sglang.launch_server ...), or correct "
                    f"rollout.url; last: {error}"
                ) from error
            if not told:
                _log.warning("waiting up to %g s: %s", wait_s, error)
                told = True
        time.sleep(_HEALTH_POLL_S)


def _version_problems(server: Mapping[str, Any]) -> list[str]:
    version = str(server.get("version"))
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found and tuple(int(part) for part in found.groups()) >= OLDEST_SGLANG:
        return []
    oldest = ".".join(str(part) for part in OLDEST_SGLANG)
    return [f"it runs SGLang {version}, and {oldest} or later is needed"]


def _model_problems(model: Mapping[str, Any], wanted: WantedModel) -> list[str]:
    found = model.get("model_type")
    if found == wanted.model_type and model.get("is_generation"):
        return []
    return [
        f"it serves a model of type {found} ({model.get('model_path')}), and model.path is of "
        f"type {wanted.model_type}"
    ]


def _argument_problems(server: Mapping[str, Any], wanted: WantedModel) -> list[str]:
    needed = {
        **_NEEDED_ARGUMENTS,
        "device": (wanted.device, f"start it with --device {wanted.device}, as this run"),
        "dtype": (wanted.dtype, f"start it with --dtype {wanted.dtype}, as model.dtype"),
    }
    if wanted.device == "cuda" and any(".shared_experts." in n for n in wanted.weight_names):
        remedy = "start it with --disable-shared-experts-fusion"
        needed["disable_shared_experts_fusion"] = (True, remedy)
    if wanted.device == "cuda" and wanted.uses_min_p:
        remedy = "SGLang dies of a request with min_p and a seed then; or set min_p to 0"
        needed["enable_deterministic_inference"] = (False, remedy)
    if wanted.uses_stop_strings:
        remedy = "leave --skip-tokenizer-init out: rollout.stop has strings"
        needed["skip_tokenizer_init"] = (False, remedy)
    # What a later version does not report any more it does not have.
    needed_by_default = {name: value for name, (value, _) in _NEEDED_ARGUMENTS.items()}
    problems = [
        f"its {name} is {server.get(name)!r}, and {value!r} is needed ({remedy})"
        for name, (value, remedy) in needed.items()
        if server.get(name, needed_by_default.get(name)) != value
    ]
    # SGLang's own arithmetic; it takes the size of the cache into account.
    context = server.get("max_req_input_len", 0) + 6
    need = wanted.context_length + CONTEXT_RESERVE
    if context < need:
        problems.append(
            f"it holds {context} tokens of context, and prompt, response and SGLang's reserve need "
            f"{need}: start it with --context-length {need} and --max-total-tokens of at least as "
            "many (where that is over the model's positions, with "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1), or lower the lengths"
        )
    return problems


def _weight_problems(client: ServerClient, wanted: WantedModel) -> list[str]:
    """Another depth or kind of layer, seen by names."""
    ranks = read_server_checksums(client, [], timeout_s=_CALL_TIMEOUT_S)
    missing, unknown = missing_and_unknown(ranks[0], wanted.weight_names)
    return [
        f"it {what} {len(names)} weights, among them {min(names)}"
        for what, names in (
            ("lacks", missing),
            ("has what model.path does not:", unknown),
        )
        if names
    ]


def _vocabulary_problems(client: ServerClient, wanted: WantedModel) -> list[str]:
    """SGLang checks the ids whose log-probs are asked for; those of a prompt could end it."""

    def refusal_of(token: int) -> str | None:
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [token],
        }
        try:
            client.post("/generate", body, timeout_s=_CALL_TIMEOUT_S, what="looking up a token")
        except EngineRefused as error:
            return str(error)
        return None

    last = wanted.vocab_size - 1
    if (said := refusal_of(last)) is not None:
        return [f"its vocabulary has no token {last}, and model.path's has: {said}"]
    if refusal_of(wanted.vocab_size) is None:
        return [f"its vocabulary has more than the {wanted.vocab_size} tokens of model.path"]
    return []


def read_server_checksums(
    client: ServerClient, skipped: list[str], *, timeout_s: float
) -> list[Mapping[str, str]]:
    """Each process's parameter names and checksums; see `sync_check.read_checksums`."""
    answer = client.post(
        "/weights_checker",
        {"action": "checksum", "skip_tensor_list": skipped},
        timeout_s=timeout_s,
        what="reading checksums of its weights",
    )
    if not answer.get("ranks"):
        raise EngineRefused(f"the server {client.url} gave no checksums: {answer.get('message')}")
    return in_rank_order(answer["ranks"])


def _honours_seeds(client: ServerClient, context_length: int) -> bool:
    """Whether equal seeds draw equal tokens.

    Raises:
        EngineGone: different seeds do: all responses to a prompt would be one.
    """
    outputs = client.post(
        "/generate",
        body_of(seed_probe(context_length)),
        timeout_s=_CALL_TIMEOUT_S,
        what="drawing by seeds",
    )
    first, same, other = (output["output_ids"] for output in outputs)
    if first == other:
        raise EngineGone(
            f"the server {client.url} cannot serve this run: seeds 1 and 2 draw the same tokens "
            f"{first} at a temperature that makes all tokens alike"
        )
    return bool(first == same)
