r"""Reward for programs: the response's Python must pass the tests that are the row's ground truth.

The program is what the last block between ``` and ``` holds that is Python's or nobody's; a
response without any scores 0. The ground truth is one of

- `{"inputs": [...], "outputs": [...]}`: text for standard input, and what must come out, compared
  word by word; with `"fn_name": "f"` arguments and what `f` must return (a list of arguments, or a
  text with one argument a line as JSON);
- `["assert f(1) == 2", ...]`: statements that run after the program, each a test;
- any other text: Python that runs after the program and raises if it is wrong.

Each test has a process of its own, confined: see `confine` for what it cannot do. Statements run in
the program's own process, so a program that looks for ways to seem right can find one; prefer
inputs and outputs, which are compared outside.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.rewards import CodeRewardSection
from megappo.errors import DataError, UserError
from megappo.rewards.base import RewardFunction, RewardTimeoutError
from megappo.rewards.confine import CannotConfineError, check
from megappo.rewards.worker_pool import EndedError, Limits, OverLimitError, WorkerPool

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.M)
_PYTHON = ("", "python", "python3", "py")
FULL_FILES = 64
"""A program's folder holds as much as this many files of the largest size."""
ENVIRONMENT = frozenset(
    {
        *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "OMP_NUM_THREADS"),
        *("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONHASHSEED"),
    }
)
"""What programs see of the trainer's variables; keys of loggers, hubs and servers are not here."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """One of a row's tests."""

    request: dict[str, Any]
    """for the worker, see `code_worker`"""
    wanted: Any
    """what its reply must hold"""


def make(settings: CodeRewardSection, *, num_workers: int) -> RewardFunction:
    """The reward with these limits.

    Args:
        settings: Limits, and how tests count.
        num_workers: Programs at once.

    Raises:
        UserError: this machine cannot confine programs.
    """
    try:
        check()
    except CannotConfineError as error:
        raise UserError(
            f"the reward 'code' runs what a model wrote only where it can be confined: {error}"
        ) from error
    file_bytes = settings.output_kb * 1024
    pool = WorkerPool(
        "megappo.rewards.code_worker",
        limits=Limits(
            timeout_s=settings.timeout_s,
            memory_bytes=settings.memory_mb * 2**20,
            # As JSON a sign takes up to six.
            max_reply_bytes=6 * file_bytes + 65536,
            max_folder_bytes=FULL_FILES * file_bytes,
        ),
        num_workers=num_workers,
        # More than the clock's: else either may end a program, and one that fails is no time-out.
        settings={"cpu_s": math.ceil(settings.timeout_s) + 1, "file_bytes": file_bytes},
        environment=ENVIRONMENT,
    )

    def reward(response: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        tests = parse_tests(ground_truth)
        program = extract_program(response)
        if program is None:
            return 0.0
        return _score(program, tests, pool, settings)

    return reward


def extract_program(response: str) -> str | None:
    """The last block of Python, None if there is none."""
    blocks = [code for language, code in _BLOCK.findall(response) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


def parse_tests(ground_truth: str) -> list[Test]:
    """The tests that a ground truth holds, see the top of this file.

    Raises:
        DataError: it holds none, or not as many outputs as inputs.
    """
    try:
        found = json.loads(ground_truth)
    except ValueError:
        found = ground_truth
    if isinstance(found, str) and found.strip():
        tests = [_statement(found)]
    elif isinstance(found, list) and all(isinstance(line, str) for line in found):
        tests = [_statement(line) for line in found]
    elif isinstance(found, dict) and _are_pairs(found):
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        name = found.get("fn_name")
        tests = [_call(name, *p) if name else _script(*p) for p in pairs]
    else:
        tests = []
    if not tests:
        raise DataError(
            f"a code ground truth must hold tests, got {ground_truth!r:.200}: give as many inputs "
            "as outputs, a list of assert statements, or Python"
        )
    return tests


def _are_pairs(found: dict[str, Any]) -> bool:
    inputs, outputs = found.get("inputs"), found.get("outputs")
    return isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)


def _statement(code: str) -> Test:
    word = secrets.token_hex(16)
    return Test(request={"code": code, "word": word}, wanted=word)


def _script(given: Any, wanted: Any) -> Test:
    return Test(request={"stdin": _as_text(given)}, wanted=_as_text(wanted).split())


def _call(name: str, given: Any, wanted: Any) -> Test:
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
    return Test(request={"call": name, "arguments": given}, wanted=wanted)


def _as_text(value: Any) -> str:
    """Lists of lines are one text."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _score(
    program: str, tests: Sequence[Test], pool: WorkerPool, settings: CodeRewardSection
) -> float:
    """1 or 0, or the share of tests passed.

    Raises:
        RewardTimeoutError: a test, or all together, took too long; with the score all the same.
    """
    deadline = time.monotonic() + settings.total_timeout_s
    num_passed, gave_up = 0, ""
    for number, test in enumerate(tests):
        if time.monotonic() > deadline:
            gave_up = f"{len(tests)} tests took over {settings.total_timeout_s} s"
            break
        try:
            num_passed += _passes(pool.ask({"program": program, "test": test.request}), test)
        except EndedError:
            pass  # The program's own doing: it has failed, as any that does not answer.
        except OverLimitError as error:
            gave_up = f"a test {error}"
        if num_passed <= number and not settings.partial:
            break
    score = num_passed / len(tests)
    score = score if settings.partial else float(score == 1.0)
    if gave_up:
        raise RewardTimeoutError(gave_up, score=score)
    return score


def _passes(reply: dict[str, Any], test: Test) -> bool:
    if "stdout" in reply:
        return bool(str(reply["stdout"]).split() == test.wanted)
    if "value" in reply:
        # As JSON, where true is not 1, and what came back has been JSON already.
        return _canonical(reply["value"]) == _canonical(test.wanted)
    return bool(reply.get("passed") == test.wanted)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
