"""Starts engines one after another in one process, ends them in every way, writes what it saw.

Usage: python lifecycle_worker.py MODEL FOLDER. A SIGKILL of this process ends the last engine.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from conftest import settings_for

from megappo.rollout.engine import EngineDied, GenerationRequest
from megappo.rollout.ports import reserve_ports
from megappo.rollout.sampling import SamplingSettings
from megappo.rollout.sglang_engine import SGLangEngine
from megappo.rollout.sglang_settings import EngineSettings


def process_state() -> dict[str, object]:
    return {
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "handlers": [
            str(signal.getsignal(s))
            for s in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT, signal.SIGCHLD)
        ],
        "root_log": [str(logging.getLogger().handlers), logging.getLogger().level],
        "sglang_log": str(logging.getLogger("sglang").handlers),
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }


def children() -> list[str]:
    """Command lines of children, without multiprocessing's resource tracker (Python's own)."""
    found = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return [line for line in found if "resource_tracker" not in line]


def blocked_signals(pid: int) -> list[str]:
    """Those that do not reach a process's main thread, by Linux's account."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
    return [number.name for number in signal.Signals if mask >> (number - 1) & 1]


def answer(engine: SGLangEngine, *, count: int = 64, tokens: int = 12) -> list[object]:
    sampling = SamplingSettings(max_new_tokens=tokens, ignore_eos=True)
    requests = [
        GenerationRequest(token_ids=(40 + i % 9, 70, 51), seed=i, sampling=sampling)
        for i in range(count)
    ]
    return [
        (c.token_ids, [p.hex() for p in c.log_probs], c.finish_reason, c.text)
        for c in engine.generate(requests)
    ]


@contextmanager
def thief(base: int) -> Iterator[list[int]]:
    """Inside, a thread takes the port of the first engine that starts, before SGLang binds it."""
    free = reserve_ports(1, local_rank=0, base=base)
    free.release()
    stolen = list(free.ports)
    before = {child.pid for child in psutil.Process().children()}
    with socket.socket() as taken:

        def steal() -> None:
            while {child.pid for child in psutil.Process().children()} <= before:
                time.sleep(0.05)
            taken.bind(("0.0.0.0", stolen[0]))
            taken.listen()

        thread = threading.Thread(target=steal)
        thread.start()
        yield stolen
        thread.join()


def death(engine: SGLangEngine) -> dict[str, object]:
    start = time.monotonic()
    try:
        answer(engine, tokens=300)
    except EngineDied as error:
        return {"message": str(error), "seconds": time.monotonic() - start}
    return {"message": "survived", "seconds": time.monotonic() - start}


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    settings = settings_for(model, folder / "engine.log", timeout_s=120.0, port_base=20000)
    facts: dict[str, object] = {"state_before": process_state(), "timeout_s": settings.timeout_s}
    # Its output goes nowhere, so that whoever reads ours need not wait for it if we fail.
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        run(settings, folder, facts, bystander)
    finally:
        bystander.kill()


def run(
    settings: EngineSettings,
    folder: Path,
    facts: dict[str, object],
    bystander: subprocess.Popen[bytes],
) -> None:
    with thief(settings.port_base) as stolen:
        first = SGLangEngine(settings)
    facts["stolen_port"], facts["port"] = stolen[0], first._ports.ports[0]
    facts["first_run"] = answer(first)
    facts["blocked_signals"] = [blocked_signals(pid) for pid in first.pids]
    start = time.monotonic()
    long = answer(first, tokens=300)
    # SGLang reports every 50 tokens, six times in all: the silence is a sixth of the time.
    first.settings = dataclasses.replace(settings, timeout_s=(time.monotonic() - start) * 0.9)
    facts["a_long_generation_goes_on"] = answer(first, tokens=300) == long
    socket_folder = first._process._folder
    first.settings = dataclasses.replace(settings, timeout_s=3.0)
    os.kill(first.pids[0], signal.SIGSTOP)
    facts["hung_while_generating"] = death(first)
    facts["asked_after_it_hung"] = death(first)
    first.shutdown()
    facts["children_after_shutdown"] = children()
    facts["socket_folder_exists"] = socket_folder.exists()
    facts["bystander_lives"] = bystander.poll() is None
    facts["state_after_shutdown"] = process_state()

    second = SGLangEngine(settings)
    facts["second_run"] = answer(second)
    threading.Timer(0.3, os.kill, (second.pids[0], signal.SIGKILL)).start()
    facts["killed_while_generating"] = death(second)
    second.shutdown()

    third = SGLangEngine(settings)
    facts["third_run"] = answer(third)
    pid = third.pids[0]
    os.kill(pid, signal.SIGKILL)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # Its parent has not asked yet.
        time.sleep(0.01)
    facts["killed_while_idle"] = death(third)
    third.shutdown()
    facts["state_after_deaths"] = process_state()
    bystander.kill()
    bystander.wait()
    facts["children_after_deaths"] = children()

    last = SGLangEngine(settings)
    facts["last_pids"] = last.pids
    (folder / "facts.json").write_text(json.dumps(facts))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
