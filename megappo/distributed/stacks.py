"""Where this process is, for a report of a hang: Python stacks, and its last collective."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback


def stacks() -> str:
    """Python stacks of all threads of this process, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(
        sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident
    )
    return "\n".join(
        f"thread {names.get(number, number)}:\n" + "".join(traceback.format_stack(frame))
        for number, frame in frames
        if number != threading.get_ident()
    )


def last_collective() -> str:
    """The last collective that this process began, of PyTorch's flight recorder."""
    from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

    dump = json.loads(_dump_fr_trace_json(True, False))
    entries = dump.get("entries", [])
    if not entries:
        return "last collective: none in PyTorch's flight recorder\n"
    last = max(entries, key=lambda entry: entry["time_created_ns"])
    age_s = time.time() - last["time_created_ns"] / 1e9
    return (
        f"last collective: {last['profiling_name']} number {last['collective_seq_id']} of group "
        f"{last['process_group']}, inputs {last['input_sizes']} {last['input_dtypes']}, state "
        f"{last['state']}, begun {age_s:.0f} s ago\n"
    )
