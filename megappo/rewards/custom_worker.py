"""What a worker process does for `custom`: loads a user's file and calls a function of it.

The file is loaded in the child, never in the supervisor: it may start threads, hang or crash. The
function's parameters say what it is given, by these names (verl's are known too):

- of one sample: `response` (`solution_str`), `ground_truth`, `data_source`, `extra_info`;
- of a batch, lists: `responses` (`solution_strs`), `ground_truths`, `data_sources`, `extra_infos`.

In: `{"samples": [[data_source, response, ground_truth, extra_info], ...]}`. Out:
`{"scores": [[score, ""] or [null, error, place], ...]}`. An async function of one sample runs for
all samples of a request at once; `"hung": [number, ...]` are those that had no score in time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from megappo.rewards.worker import Task

FIELDS = {
    "data_source": 0, "response": 1, "solution_str": 1, "ground_truth": 2, "extra_info": 3,
}  # fmt: skip
"""Parameter -> its place in a sample."""
MANY = {f"{name}s": place for name, place in FIELDS.items()}
_state: dict[str, Any] = {}


def _start(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError if there is no such function, or it cannot be called with a sample."""
    path, name = Path(settings["path"]), settings["name"]
    function = _load(path, name)
    names = _parameters(function, f"reward.custom: {name} of {path}")
    is_batch = bool(names) and names[0] in MANY
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an object's own async method)
    )
    _state.update(function=function, names=names, is_batch=is_batch, is_async=is_async)
    _state.update(timeout_s=settings["sample_timeout_s"])
    return {"is_batch": is_batch, "is_async": is_async}


def _load(path: Path, name: str) -> Callable[..., Any]:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("megappo_custom_reward", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.custom.path is {str(path)!r}: it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"reward.custom.path {path} cannot be loaded: {type(error).__name__}: {error}"
            f"{_place(error)}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise ValueError(
            f"reward.custom.name is {name!r}: {path} has no such function; it has: "
            f"{', '.join(known) or 'none'}"
        )
    return found  # type: ignore[no-any-return]


def _parameters(function: Callable[..., Any], what: str) -> list[str]:
    """Names of the parameters that are filled: all of one sample, or all of a batch."""
    filled, unknown = [], []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        is_named = parameter.kind is not parameter.POSITIONAL_ONLY
        if is_named and parameter.name in {**FIELDS, **MANY}:
            filled.append(parameter.name)
        elif parameter.default is parameter.empty:
            unknown.append(parameter.name)
    rule = (
        f"its parameters are named {', '.join(FIELDS)}, or for a batch {', '.join(MANY)}; others "
        "need a default"
    )
    if unknown:
        raise ValueError(f"{what} has the parameter {unknown[0]!r}: {rule}")
    batch = [name for name in filled if name in MANY]
    if batch and len(batch) < len(filled):
        raise ValueError(f"{what} mixes one sample and a batch ({', '.join(filled)}): {rule}")
    if not any({**FIELDS, **MANY}[name] == FIELDS["response"] for name in filled):
        raise ValueError(f"{what} takes no response: {rule}")
    return filled


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    samples: list[list[Any]] = request["samples"]
    if _state["is_batch"]:
        return {"scores": _of_batch(samples)}
    if _state["is_async"]:
        return _of_all_at_once(samples, timeout_s=_state["timeout_s"])
    return {"scores": [_of_one(sample) for sample in samples]}


def _of_batch(samples: Sequence[Sequence[Any]]) -> list[list[Any]]:
    given = {n: [sample[MANY[n]] for sample in samples] for n in _state["names"]}
    try:
        found = _state["function"](**given)
        if _state["is_async"]:
            found = asyncio.run(_awaited(found))
        values = list(found)
        if len(values) != len(samples):
            raise ValueError(f"{len(values)} scores came back for {len(samples)} samples")
    except Exception as error:
        return [_failure(error)] * len(samples)
    return [_value_or_failure(value) for value in values]


def _of_all_at_once(samples: Sequence[Sequence[Any]], *, timeout_s: float) -> dict[str, Any]:
    """The reply; this process is of no more use if a sample hangs."""
    hung: list[int] = []
    runner = asyncio.Runner()
    try:
        tasks = runner.run(_started(samples, timeout_s))
        hung = [number for number, task in enumerate(tasks) if not task.done()]
        scores = [task.result() if task.done() else _no_score("hung") for task in tasks]
        return {"scores": scores, "hung": hung, "spent": bool(hung)}
    finally:
        # What hangs may be a thread, for which `close` would wait.
        if not hung:
            runner.close()


async def _started(
    samples: Sequence[Sequence[Any]], timeout_s: float
) -> list[asyncio.Task[list[Any]]]:
    """A task for each sample, with all the time that they get."""

    async def one(sample: Sequence[Any]) -> list[Any]:
        try:
            return _value(await _state["function"](**_given(sample)))
        except (Exception, asyncio.CancelledError) as error:
            return _failure(error)

    tasks = [asyncio.create_task(one(sample)) for sample in samples]
    await asyncio.wait(tasks, timeout=timeout_s)
    return tasks


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return await coroutine


def _of_one(sample: Sequence[Any]) -> list[Any]:
    try:
        return _value(_state["function"](**_given(sample)))
    except Exception as error:
        return _failure(error)


def _given(sample: Sequence[Any]) -> dict[str, Any]:
    return {name: sample[FIELDS[name]] for name in _state["names"]}


def _value(value: Any) -> list[Any]:
    """`[score, ""]`; a dictionary's `score` counts, as in verl."""
    if isinstance(value, Mapping) and "score" in value:
        value = value["score"]
    if not isinstance(value, Real):
        kind = type(value).__name__
        return _no_score(f"TypeError: a reward must return one number, got {value!r:.100} ({kind})")
    score = float(value)
    if not math.isfinite(score):
        return _no_score(f"ValueError: a reward must return a finite number, got {score}")
    return [score, ""]


def _value_or_failure(value: Any) -> list[Any]:
    try:
        return _value(value)
    except Exception as error:
        return _failure(error)


def _no_score(text: str) -> list[Any]:
    return [None, text, "its return value"]


def _failure(error: BaseException) -> list[Any]:
    if isinstance(error, MemoryError):
        raise error
    return [None, f"{type(error).__name__}: {error}"[:2000], _place(error).strip(" ()")]


def _place(error: BaseException) -> str:
    """` (file:line in function)` of the user's code that the error came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename not in (__file__, inspect.__file__)]
    if not mine:
        return ""
    return f" ({Path(mine[-1].filename).name}:{mine[-1].lineno} in {mine[-1].name})"


TASK = Task(answer=_answer, start=_start)
