"""What a worker process does for `code`: runs a program that a model wrote, against one test.

Each request has a process and an empty folder of its own, and is confined before it begins (see
`confine`). The trainer, not this process, compares: what a program should have answered is not
here, so that a program cannot read it. Only a test that is itself code must run beside the program.

In: `{"program": str, "test": {...}}`, where the test is one of `{"stdin": str}`, `{"call": name,
"arguments": [...]}` and `{"code": str, "word": str}`. Out: `{"stdout": str}`, `{"value": JSON}`,
`{"passed": word}`, or `{"raised": text}`.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.rewards.confine import confine
from megappo.rewards.worker import Task

_settings: dict[str, Any] = {}
_RAISED_CHARACTERS = 300


def _start(settings: Mapping[str, Any]) -> dict[str, Any]:
    _settings.update(settings)
    return {}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    test: dict[str, Any] = request["test"]
    output = _redirect(test.get("stdin", ""))
    _settle(Path.cwd())
    confine(
        Path.cwd(),
        cpu_s=_settings["cpu_s"],
        memory_bytes=_settings["memory_bytes"],
        file_bytes=_settings["file_bytes"],
    )
    try:
        found = _run(request["program"], test)
        sys.stdout.flush()
    except MemoryError:
        raise
    except BaseException as error:  # of the program's own choice: it has failed
        return {"raised": f"{type(error).__name__}: {error}"[:_RAISED_CHARACTERS]}
    if "stdin" not in test:
        return found
    size = os.lseek(output, 0, os.SEEK_END)
    return {"stdout": os.pread(output, size, 0).decode(errors="replace")}


def _redirect(stdin: str) -> int:
    """The program's standard input and output are files of its folder; errors go nowhere."""
    Path("stdin").write_text(stdin)
    output = os.open("stdout", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(io.FileIO(2, "w", closefd=False)))
    sys.argv = ["program"]
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path.cwd()))
    return output


def _settle(folder: Path) -> None:
    """The only place that the program can write to is its home."""
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _run(program: str, test: Mapping[str, Any]) -> dict[str, Any]:
    is_script = "stdin" in test
    names: dict[str, Any] = {"__name__": "__main__" if is_script else "program"}
    try:
        exec(compile(program, "program", "exec"), names)
    except SystemExit:
        # How a script may end; one that others call has ended too early.
        if not is_script:
            raise
    if "call" in test:
        value = _function(names, test["call"])(*test["arguments"])
        return {"value": json.loads(json.dumps(value))}
    if "code" in test:
        exec(compile(test["code"], "test", "exec"), names)
        return {"passed": test["word"]}
    return {}


def _function(names: Mapping[str, Any], name: str) -> Any:
    """The function of that name, or the method of a class `Solution`, as such data has it."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)
    return names[name]


TASK = Task(answer=_answer, start=_start, one_request_a_child=True)
