"""`rollout.url` of a config as settings of servers, and the check of all of them before a run."""

from __future__ import annotations

import os

from megappo.config import Config, ConfigError
from megappo.errors import UserError
from megappo.models.weights import hf_names
from megappo.rollout.engine import EngineFailure
from megappo.rollout.server_checks import ServerFacts, WantedModel, inspect_server
from megappo.rollout.server_client import ServerClient
from megappo.rollout.sglang_server import ServerSettings
from megappo.trainer.preflight import Preflight


def context_length(config: Config) -> int:
    """Most tokens of a prompt and its response, in training and validation."""
    longest = max(config.rollout.max_response_length, config.rollout.val_response_length)
    return config.data.max_prompt_length + longest


def server_settings(config: Config, found: Preflight, url: str, *, device: str) -> ServerSettings:
    """How this run uses one server.

    Raises:
        ConfigError: see `api_key_of`.
    """
    rollout, spec = config.rollout, found.actor_spec
    return ServerSettings(
        url=url,
        model=WantedModel(
            model_type=spec.model_type,
            vocab_size=spec.vocab_size,
            num_kv_heads=spec.num_kv_heads,
            weight_names=frozenset(hf_names(spec)),
            context_length=context_length(config),
            dtype=config.model.dtype,
            device=device,
            uses_stop_strings=bool(rollout.stop),
            uses_min_p=rollout.min_p > 0 or rollout.val.min_p > 0,
        ),
        tokenizer=found.tokenizer,
        api_key=api_key_of(rollout.api_key_env),
        bucket_bytes=rollout.sync_bucket_bytes,
        verify_sync=rollout.verify_sync,
        timeout_s=rollout.timeout_s,
        generate_timeout_s=config.trainer.distributed_timeout_s,
        wait_s=rollout.server_wait_s,
        sync_address=rollout.sync_address,
    )


def check_servers(config: Config, found: Preflight, *, device: str) -> list[ServerFacts]:
    """Asks each server whether it fits; waits for those that are still starting.

    Raises:
        UserError: the first one that does not, and why.
    """
    facts = []
    for url in config.rollout.url:
        settings = server_settings(config, found, url, device=device)
        client = ServerClient(url, api_key=settings.api_key)
        try:
            facts.append(inspect_server(client, settings.model, wait_s=settings.wait_s))
        except EngineFailure as error:
            raise UserError(str(error)) from error
    return facts


def api_key_of(variable: str) -> str | None:
    """The key that an environment variable holds; None where none is named.

    Raises:
        ConfigError: the variable is not set.
    """
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the variable {variable} that rollout.api_key_env names holds characters that no HTTP "
            "header may have: export the key alone"
        )
    if not key:
        raise ConfigError(
            f"rollout.api_key_env is {variable!r}, and no such variable is set on this host: "
            f"export {variable}=KEY before the start, or leave rollout.api_key_env out"
        )
    return key
