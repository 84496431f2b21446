"""Rules of `rollout.url`: servers that somebody else runs. No server is asked anything here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from megappo.config.sections import Config, RolloutSection

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_servers(config: Config) -> list[str]:
    """Broken rules of the settings of servers."""
    rollout = config.rollout
    if not rollout.url:
        return [
            f"rollout.{name} is set and rollout.url is []: it is for servers alone; name them, or "
            f"leave rollout.{name} out"
            for name in ("api_key_env", "sync_address")
            if getattr(rollout, name)
        ]
    problems = _check_urls(rollout.url)
    if rollout.api_key_env and not _VARIABLE.fullmatch(rollout.api_key_env):
        # Not shown: it may be the key itself.
        problems.append(
            "rollout.api_key_env is no name of an environment variable: put the key into a "
            "variable, and the variable's name here"
        )
    problems += _check_engine(rollout)
    if rollout.server_wait_s >= config.trainer.distributed_timeout_s:
        problems.append(
            f"rollout.server_wait_s is {rollout.server_wait_s:g}: the other ranks wait in a "
            "collective while one waits for its server, so it must be under "
            f"trainer.distributed_timeout_s ({config.trainer.distributed_timeout_s:g}); lower it, "
            "or raise that"
        )
    return problems


def check_number_of_servers(urls: Sequence[str], world_size: int) -> list[str]:
    """Each server has a rank of its own, which sends it weights and requests."""
    if len(urls) <= world_size:
        return []
    return [
        f"rollout.url names {len(urls)} servers and there are {world_size} ranks: each server "
        f"needs a rank of its own; start {len(urls)} ranks or more, or name fewer servers"
    ]


def server_owners(num_servers: int, world_size: int) -> list[int]:
    """The rank of each server: spread evenly, in any layout the same."""
    return [server * world_size // num_servers for server in range(num_servers)]


def _check_urls(urls: Sequence[str]) -> list[str]:
    problems = []
    for url in urls:
        try:
            parts = urlsplit(url)
            _ = parts.port
            (parts.hostname or "").encode("idna")
        except ValueError as error:
            problems.append(f"rollout.url has {url!r}: {error}; write http://HOST:PORT")
            continue
        if parts.scheme not in ("http", "https") or not parts.hostname:
            problems.append(f"rollout.url has {url!r}: write http://HOST:PORT or https://HOST:PORT")
        elif parts.username or parts.password:
            problems.append(
                f"rollout.url has a name or password for {parts.hostname}: it would be written "
                "into the run's folder; name a variable in rollout.api_key_env"
            )
        elif parts.query or parts.fragment:
            problems.append(f"rollout.url has {url!r}: leave out what follows '?' or '#'")
    plain = [url.rstrip("/") for url in urls]
    problems += [
        f"rollout.url has {url!r} {plain.count(url)} times: name each server once"
        for url in dict.fromkeys(plain)
        if plain.count(url) > 1
    ]
    return problems


def _check_engine(rollout: RolloutSection) -> list[str]:
    problems = []
    if rollout.engine != "sglang":
        problems.append(
            f"rollout.engine is {rollout.engine!r} and rollout.url names servers: they are "
            "SGLang's; set rollout.engine=sglang, or leave rollout.url out"
        )
    if rollout.tp != 1:
        problems.append(
            f"rollout.tp is {rollout.tp} and rollout.url names servers: how a server splits the "
            "model is its own matter (--tp-size); leave rollout.tp out"
        )
    if rollout.sleep:
        problems.append(
            "rollout.sleep is True and rollout.url names servers: their memory is not the "
            "trainer's, so there is nothing to give back; set rollout.sleep=false"
        )
    return problems
