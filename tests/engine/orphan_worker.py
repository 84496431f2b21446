"""A parent that is killed right after it has started a process as SGLang's are started.

Usage: python orphan_worker.py FOLDER early|late. The child ties itself to its parent while that is
there (early), or once it is gone (late); it writes `pid` first, and `survived` if it gets so far.
"""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from megappo.rollout.sglang_orphans import end_with_parent


def child(folder: Path, moment: str, parent: int) -> None:
    if moment == "early":
        end_with_parent()
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    deadline = time.monotonic() + 60
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(0.01)
    if moment == "late":
        end_with_parent()
    (folder / "survived").touch()


if __name__ == "__main__":
    folder, moment = Path(sys.argv[1]), sys.argv[2]
    context = multiprocessing.get_context("spawn")
    context.Process(target=child, args=(folder, moment, os.getpid())).start()
    while not (folder / "pid").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
