"""What a GPU image must hold: `python -m megappo.doctor.image`, run while it is built.

There is no GPU in a build, so kernels are imported and not run. Exit code 1 names every part that
is missing, cannot be imported or has another version than it should.
"""

from __future__ import annotations

import importlib
import re
import sys

from megappo.distributed.cpu_backend import TESTED_MEGATRON
from megappo.doctor.machine import apex_is_nvidias, version_of
from megappo.errors import EXIT_DONE, EXIT_FAILED

PARTS = {
    "torch": "torch",
    "transformer_engine.pytorch": "transformer-engine",
    "megatron.core": "megatron-core",
    "sglang": "sglang",
    "sgl_kernel": "sglang-kernel",
    "flashinfer": "flashinfer-python",
    "torch_memory_saver": "torch-memory-saver",
    "megappo.train": "megappo",
}
"""Modules that are imported, and the package of each."""

TESTED_SGLANG = "0.5.23"
"""Our plug-ins reach into it; `requirements/` pins it."""

SGLANG_KERNEL = "0.4.10"
"""That this SGLang asks for."""

TRANSFORMER_ENGINE = ((2, 9), (2, 12))
"""From, and up to but without, the versions that megatron-core 0.16.1 was written for."""

RULE_OF_ENGINE = "it must be 2.9 or later and under 2.12"
"""The same in words."""


def problems() -> list[str]:
    """Every part that is not as it should be."""
    found = []
    for module, package in PARTS.items():
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:  # OSError: a library that the linker cannot load
            found.append(f"{package}: {module} cannot be imported: {error}")
    megatron, engine = version_of("megatron-core"), version_of("transformer-engine")
    if megatron != TESTED_MEGATRON:
        found.append(f"megatron-core is {megatron or 'missing'}: it must be {TESTED_MEGATRON}")
    if engine and not fits(engine):
        found.append(f"transformer-engine is {engine}: {RULE_OF_ENGINE}")
    for package, tested in (("sglang", TESTED_SGLANG), ("sglang-kernel", SGLANG_KERNEL)):
        version = version_of(package)
        if version and public(version) != tested:
            found.append(f"{package} is {version}: it must be {tested}")
    if not apex_is_nvidias():
        found.append("apex is not NVIDIA's, or missing")
    return found


def fits(version: str) -> bool:
    """Whether a version of Transformer Engine is one that Megatron-Core knows."""
    numbers = re.match(r"(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return False
    low, high = TRANSFORMER_ENGINE
    return low <= (int(numbers[1]), int(numbers[2] or 0)) < high


def public(version: str) -> str:
    """A version without the part that names a build, as in `0.4.10+cu130`."""
    return version.partition("+")[0]


def main() -> int:
    """Prints what is wrong."""
    found = problems()
    sys.stdout.write("".join(f"{line}\n" for line in found) or "the image is complete\n")
    return EXIT_FAILED if found else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
