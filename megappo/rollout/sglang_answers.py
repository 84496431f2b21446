"""What SGLang's answers mean: the same whether they come from our processes or over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megappo.rollout.engine import EngineRefused, GenerationRequest, response_text
from megappo.rollout.sampling import SamplingSettings
from megappo.types import Completion

_ABORT_RETRIES = 3
_PROBE_TEMPERATURE = 1e4
"""Near-uniform draws: different seeds agree with a chance of 1/V^8."""

FINISHED = ("stop", "length")
"""Reasons why a response is whole."""

Send = Callable[[Sequence[GenerationRequest]], list[dict[str, Any]]]


def body_of(requests: Sequence[GenerationRequest]) -> dict[str, Any]:
    """The fields of SGLang's `GenerateReqInput`: all requests as one batch, as one message."""
    return {
        "input_ids": [list(request.token_ids) for request in requests],
        "sampling_params": [r.sampling.to_sglang(seed=r.seed) for r in requests],
        "return_logprob": True,
    }


def outputs_of(
    requests: Sequence[GenerationRequest], send: Send
) -> tuple[list[dict[str, Any]], int]:
    """SGLang's answers; a response that it broke off is sampled again, with its own seed.

    Returns:
        The answers in the order of the requests, and how many had to be sampled again.
    """
    outputs, num_aborted = send(requests), 0
    for _ in range(_ABORT_RETRIES):
        lost = [i for i, output in enumerate(outputs) if _is_aborted(output)]
        if not lost:
            break
        num_aborted += len(lost)
        again = send([requests[i] for i in lost])
        for i, output in zip(lost, again, strict=True):
            outputs[i] = output
    return outputs, num_aborted


def completion_of(output: dict[str, Any], *, version: str, tokenizer: Any) -> Completion:
    """One answer as a completion.

    Args:
        output: one of SGLang's.
        version: of the weights that it must come from.
        tokenizer: of the model.

    Raises:
        EngineRefused: the response is unfinished or empty, or of other weights.
    """
    meta = output["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] not in FINISHED:
        raise EngineRefused(f"SGLang did not finish a response: {reason}")
    if meta["weight_version"] != version:
        raise EngineRefused(
            f"a response comes from weight version {meta['weight_version']}, and version "
            f"{version} was pushed last"
        )
    ids = tuple(output["output_ids"])
    if not ids:
        raise EngineRefused(f"SGLang returned a response without tokens: {reason}")
    log_probs = tuple(entry[0] for entry in meta["output_token_logprobs"])
    if len(log_probs) != len(ids):
        raise EngineRefused(f"SGLang returned {len(ids)} tokens and {len(log_probs)} log-probs")
    return Completion(
        token_ids=ids,
        log_probs=log_probs,
        finish_reason=reason["type"],
        text=response_text(tokenizer, ids, matched=reason.get("matched")),
    )


def seed_probe(context_length: int) -> list[GenerationRequest]:
    """Three requests with the seeds 1, 1 and 2: the first two must agree, the last one differ."""
    length = min(8, context_length - 1)
    sampling = SamplingSettings(
        max_new_tokens=length, temperature=_PROBE_TEMPERATURE, ignore_eos=True
    )
    return [GenerationRequest(token_ids=(0,), seed=seed, sampling=sampling) for seed in (1, 1, 2)]


def _is_aborted(output: dict[str, Any]) -> bool:
    return bool(output["meta_info"]["finish_reason"]["type"] == "abort")
