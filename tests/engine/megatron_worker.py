"""Answers requests with the in-process engine, so that a test can lay SGLang's beside them.

Usage: megatron_worker.py MODEL CONTEXT REQUESTS.json ANSWERS.json. In a process of its own, because
Megatron on a CPU changes the interpreter that imports it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from megappo.distributed import parallel
from megappo.distributed.parallel import Degrees, LaunchEnvironment
from megappo.models.build import build_chunk, transformer_config
from megappo.models.spec import load_spec
from megappo.models.weights import load_hf_weights
from megappo.rollout.engine import GenerationRequest
from megappo.rollout.megatron_engine import MegatronEngine
from megappo.rollout.sampling import SamplingSettings, end_token_ids


def main() -> None:
    model, context_length, requests, answers = sys.argv[1:]
    context = parallel.start(
        LaunchEnvironment.read(), Degrees(), device="cpu", seed=1, timeout_s=300
    )
    spec = load_spec(model)
    config = transformer_config(spec, tp=1, pp=1)
    chunk = build_chunk(spec, config, head="lm", pre_process=True, post_process=True)
    load_hf_weights([chunk], model, spec, head="lm")
    engine = MegatronEngine(
        chunk=chunk, vocab_size=spec.vocab_size, memory=None, context=context,
        tokenizer=AutoTokenizer.from_pretrained(model), end_tokens=frozenset(end_token_ids(model)),
        context_length=int(context_length), max_running_requests=8,
    )  # fmt: skip
    wanted = [
        GenerationRequest(
            token_ids=tuple(request["token_ids"]),
            seed=request["seed"],
            sampling=SamplingSettings(**request["sampling"]),
        )
        for request in json.loads(Path(requests).read_text())
    ]
    found = [dataclasses.asdict(answer) for answer in engine.generate(wanted)]
    Path(answers).write_text(json.dumps(found))
    parallel.stop(context)


if __name__ == "__main__":
    main()
