"""The doctor's findings as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.doctor.machine import PACKAGES, Machine
from megappo.doctor.needs import Line, gib


def machine_text(machine: Machine) -> str:
    """What the machine has, a line each."""
    gpus = [f"{gpu.name}, {gib(gpu.memory_bytes)}, {gpu.capability}" for gpu in machine.gpus]
    first, last = machine.ports
    rows = {
        "host": machine.host,
        "GPUs": "; ".join(gpus) or "none that PyTorch sees",
        "driver": machine.driver or "none",
        "CUDA": machine.cuda or "none (a CPU build of PyTorch)",
        "NCCL": machine.nccl or "none",
        "cores": str(machine.num_cpus),
        "memory": f"{gib(machine.memory_bytes)}, {gib(machine.available_bytes)} can be taken",
        "/dev/shm": f"{gib(machine.shm_bytes)}, {gib(machine.shm_free_bytes)} free",
        "open files": f"{machine.open_files_soft} (hard limit {machine.open_files_hard})",
        "ports of engines": (
            f"{first} to {last}, {machine.num_free_ports} of {last - first + 1} free"
        ),
        "python": machine.python,
    } | {name: machine.packages.get(name, "-") for name in PACKAGES}
    return "".join(f"{name:<19} {value}\n" for name, value in rows.items())


def needs_text(lines: Sequence[Line], *, config: str, ranks: int) -> str:
    """What a config needs, and what to do about what is missing."""
    text = f"\n{config} with {ranks} rank(s) on this machine:\n"
    for line in lines:
        text += f"  {line.state:<8} {line.what:<21} {line.found}\n"
        if line.remedy:
            text += f"{'':<11}{line.remedy}\n"
    missing = [line.what for line in lines if line.state == "missing"]
    return text + (f"missing: {', '.join(missing)}\n" if missing else "nothing is missing\n")
