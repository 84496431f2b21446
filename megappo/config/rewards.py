"""Which rewards score which rows, and their settings.

A row's `data_source` names its reward, or `reward.sources` says which ones it stands for: one name,
or a list whose scores are summed with weights. A reward's settings are the section of its name; a
part of a list may set fields of that section for itself.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from megappo.config.fields import Problems, opt, section

OTHERS = "*"
"""Stands in `reward.sources` for every data_source that has no line of its own."""
TOTAL = "score"
"""How the weighted sum is called among the metrics of a source, so no part may be."""

_OWN_KEYS = ("name", "weight", "label")
_WITHOUT_SECTION = {"gsm8k": ("gsm8k_method",), "arithmetic": ("gsm8k_method",)}
_LABEL = re.compile(r"[A-Za-z0-9_.-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class LengthRewardSection:
    """`length`: 1 from min_tokens to free_tokens, then falling to 0 at max_tokens."""

    min_tokens: int = opt(0, "a shorter response scores 0")
    free_tokens: int = opt(256, "longest response that scores 1")
    max_tokens: int = opt(512, "shortest response that scores 0 for its length")

    def __post_init__(self) -> None:
        p = Problems()
        p.not_negative(min_tokens=self.min_tokens)
        p.require(
            self.min_tokens <= self.free_tokens, "min_tokens", self.min_tokens,
            f"it must be at most free_tokens ({self.free_tokens})",
        )  # fmt: skip
        p.require(
            self.free_tokens < self.max_tokens, "free_tokens", self.free_tokens,
            f"it must be under max_tokens ({self.max_tokens})",
        )  # fmt: skip
        p.done()


@dataclass(frozen=True, kw_only=True)
class FormatRewardSection:
    """`format`: 1 if the response is laid out as wanted; set pattern, tags or both."""

    pattern: str = opt("", "regular expression that the whole response must match (. is any sign)")
    tags: list[str] = opt(
        [], "the response is <a>...</a><b>...</b> of these names, each once, white space between"
    )
    timeout_s: float = opt(1.0, "seconds for matching one response")

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(timeout_s=self.timeout_s)
        for tag in self.tags:
            p.require(bool(_LABEL.fullmatch(tag)), "tags", tag, "a name without brackets")
        p.require(len(set(self.tags)) == len(self.tags), "tags", self.tags, "name each tag once")
        p.done()


@dataclass(frozen=True, kw_only=True)
class CodeRewardSection:
    """`code`: 1 if the response's Python program passes the row's tests, confined."""

    timeout_s: float = opt(10.0, "seconds of wall clock for each test; of CPU time a second more")
    total_timeout_s: float = opt(60.0, "seconds for all tests of a response")
    memory_mb: int = opt(1024, "MiB of address space")
    output_kb: int = opt(256, "KiB that a program may write to its output, and to each file")
    partial: bool = opt(False, "score the share of tests passed; else all must pass")

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(
            timeout_s=self.timeout_s,
            total_timeout_s=self.total_timeout_s,
            output_kb=self.output_kb,
        )
        p.require(self.memory_mb >= 128, "memory_mb", self.memory_mb, "Python needs 128 or more")
        p.done()


@dataclass(frozen=True, kw_only=True)
class RemoteRewardSection:
    """`remote`: scores from a server over HTTP, see docs/rewards.md for what is sent."""

    url: str = opt("", "where samples are posted to, http://... or https://...")
    timeout_s: float = opt(30.0, "seconds for one answer")
    retries: int = opt(3, "tries after the first, for no answer and for 408, 429 and 5xx")
    backoff_s: float = opt(0.5, "seconds before the first retry; doubled for each further one")
    batch_size: int = opt(1, "samples sent at once")
    api_key_env: str = opt("", "environment variable that holds the API key; empty: none is sent")

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(timeout_s=self.timeout_s, batch_size=self.batch_size)
        p.not_negative(retries=self.retries, backoff_s=self.backoff_s)
        p.require(
            not self.url or _is_http(self.url), "url", self.url, "http://HOST or https://HOST..."
        )
        if self.api_key_env and not _VARIABLE.fullmatch(self.api_key_env):
            # Not shown: it may be the key itself.
            p.messages.append(
                "api_key_env is no name of an environment variable: put the key into a variable, "
                "and the variable's name here"
            )
        p.done()


@dataclass(frozen=True, kw_only=True)
class CustomRewardSection:
    """`custom`: a function of a Python file, in a process of its own."""

    path: str = opt("", "Python file", verl="custom_reward_function.path")
    name: str = opt(
        "compute_score", "function in it: sync or async, of one sample or of a batch",
        verl="custom_reward_function.name",
    )  # fmt: skip
    timeout_s: float = opt(60.0, "seconds for one call")
    memory_mb: int = opt(8192, "MiB of address space of each process")
    max_processes: int = opt(16, "processes at work below one call, itself included")
    batch_size: int = opt(
        64, "samples of one call of an async or a batch function; 0: all that a rank scores"
    )

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(timeout_s=self.timeout_s, max_processes=self.max_processes)
        p.not_negative(batch_size=self.batch_size)
        p.require(self.memory_mb >= 128, "memory_mb", self.memory_mb, "Python needs 128 or more")
        p.require(self.name.isidentifier(), "name", self.name, "name a function")
        p.done()


@dataclass(frozen=True, kw_only=True)
class RewardPart:
    """One term of the weighted sum of a data_source."""

    name: str
    """of the reward"""
    weight: float
    label: str
    """of its metric"""
    settings: RewardSection
    """with the fields that this part sets for itself"""


@dataclass(frozen=True, kw_only=True)
class RewardSection:
    """Rewards are chosen by each row's `data_source`."""

    sources: dict[str, Any] = opt(
        {},
        "data_source -> a reward's name, or a list of names or {name, weight, label, fields of "
        "its section}, whose scores are summed; '*' is for all others. A data_source that is not "
        "here is itself the name of its reward",
    )
    gsm8k_method: Literal["strict", "flexible"] = opt(
        "strict", "strict needs '#### N'; flexible falls back to the last number"
    )
    length: LengthRewardSection = section(LengthRewardSection, "length")
    format: FormatRewardSection = section(FormatRewardSection, "format")
    code: CodeRewardSection = section(CodeRewardSection, "code")
    remote: RemoteRewardSection = section(RemoteRewardSection, "remote")
    custom: CustomRewardSection = section(CustomRewardSection, "custom")
    overlap: bool = opt(
        True, "score each response when it ends, while others are generated; changes no score"
    )
    num_examine: int = opt(
        0, "samples of each data_source shown on the screen a step", verl="reward_model.num_examine"
    )
    num_threads: int = opt(4, "responses scored at once on a rank", verl="reward_model.num_workers")
    step_timeout_s: float = opt(
        0.0,
        "seconds that a step waits for its rewards once the responses are there; a sample without "
        "a score then counts as failed. 0: until every reward has ended",
    )
    max_error_rate: float = opt(
        0.05,
        "share of a step's responses, over all ranks, whose reward may fail before the run stops",
    )
    overlong_buffer: int = opt(
        0,
        "tokens before rollout.max_response_length over which a training score is lowered, up to "
        "overlong_penalty_factor; 0: never",
        verl="reward_model.overlong_buffer.len",
    )
    overlong_penalty_factor: float = opt(
        1.0, "most that overlong_buffer takes from a score",
        verl="reward_model.overlong_buffer.penalty_factor",
    )  # fmt: skip

    def __post_init__(self) -> None:
        p = Problems()
        p.positive(
            num_threads=self.num_threads, overlong_penalty_factor=self.overlong_penalty_factor
        )
        p.not_negative(
            overlong_buffer=self.overlong_buffer,
            num_examine=self.num_examine,
            step_timeout_s=self.step_timeout_s,
        )
        p.within(0, 1, max_error_rate=self.max_error_rate)
        for source in self.sources:
            try:
                self.parts(source)
            except ValueError as error:
                p.messages += [f"sources.{source}: {line}" for line in str(error).splitlines()]
        p.done()

    def parts(self, data_source: str) -> tuple[RewardPart, ...]:
        """The terms of a data_source's score. Names of rewards are not looked up here.

        Raises:
            ValueError: its line in `sources` breaks a rule.
        """
        given = self.sources.get(data_source, self.sources.get(OTHERS, data_source))
        terms = given if isinstance(given, list) else [given]
        if not terms:
            raise ValueError("the list is empty: name a reward")
        parts = tuple(self._part(term) for term in terms)
        labels = [part.label for part in parts]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"label {twice[0]!r} comes twice: give each part a label of its own")
        return parts

    def _part(self, term: Any) -> RewardPart:
        fields = term if isinstance(term, Mapping) else {"name": term}
        name, weight = fields.get("name"), fields.get("weight", 1.0)
        label = fields.get("label", name)
        if not isinstance(name, str) or (not name and term != ""):
            raise ValueError(f"{term!r} is no reward: give a name, or {{name: ..., weight: ...}}")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight):
            raise ValueError(f"weight is {weight!r}: it must be a finite number")
        if label == TOTAL or (fields is term and not _is_label(label)):
            raise ValueError(
                f"label is {label!r}: it becomes a part of a metric's name; use letters, digits, "
                f"'_', '-' and '.', and not {TOTAL!r}"
            )
        own = {str(k): v for k, v in fields.items() if k not in _OWN_KEYS}
        return RewardPart(
            name=name, weight=float(weight), label=str(label), settings=self._with_own(name, own)
        )

    def _with_own(self, name: str, own: Mapping[str, Any]) -> RewardSection:
        """These settings with a part's own fields; without `sources`, which it needs no more."""
        settings = dataclasses.replace(self, sources={})
        if not own:
            return settings
        inner = getattr(self, name) if name in SECTIONS else None
        if inner is None:
            _check_keys(own, name, _WITHOUT_SECTION.get(name, ()))
            return dataclasses.replace(settings, **own)
        _check_keys(own, name, tuple(f.name for f in dataclasses.fields(inner)))
        for field in dataclasses.fields(inner):
            if field.name in own and not _fits(own[field.name], getattr(inner, field.name)):
                raise ValueError(
                    f"{name}.{field.name} is {own[field.name]!r}: it must be of type {field.type}"
                )
        return dataclasses.replace(settings, **{name: dataclasses.replace(inner, **own)})


def _sections() -> Iterator[str]:
    for field in dataclasses.fields(RewardSection):
        factory = field.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield field.name


SECTIONS = tuple(_sections())
"""Rewards with settings of their own."""


def _check_keys(own: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    for key in own:
        if key not in known:
            raise ValueError(
                f"{key} is not a known key of a {name} part; known: "
                f"{', '.join((*_OWN_KEYS, *known))}"
            )


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    return isinstance(value, type(default))


def _is_label(label: object) -> bool:
    return isinstance(label, str) and _LABEL.fullmatch(label) is not None


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
