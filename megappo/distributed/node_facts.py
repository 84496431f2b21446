"""What the nodes of a run must have in common, and which node is the odd one.

A run over several nodes has as many copies of the config, of the packages and of this program as it
has nodes. One old copy trains wrongly or hangs in a collective; here it is named before that.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import runpy
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "sglang",
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flash-attn",
    "triton",
    "transformers",
)
"""Whose versions decide what a rank computes and sends: programs, and the kernels under them."""
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_NCCL_LIBRARY = "libnccl.so.2"
_ABSENT = "not installed"
_MAX_LINES = 12
_MAX_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node, as it tells of itself."""

    node: int
    host: str
    address: str
    """of the interface towards the others"""
    settings: Mapping[str, str]
    """what must be equal on all nodes, by name"""
    problem: str = ""
    """why this node cannot take part, if it cannot"""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"node {self.node} ({self.host}, {self.address})"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeFacts:
        """The other way round.

        Raises:
            ValueError: the text is something else.
        """
        try:
            values = json.loads(text)
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the facts of a node: {text[:80]!r}") from error


def gather_facts(
    config: Mapping[str, Any],
    *,
    node: int,
    address: str,
    num_nodes: int,
    local_world_size: int,
    problem: str = "",
) -> NodeFacts:
    """The facts of this node.

    Args:
        config: every setting by its dotted name, overrides applied.
        node: this one's number.
        address: of this node, as others reach it.
        num_nodes: of the run, as this node was told.
        local_world_size: ranks that this node starts.
        problem: why this node cannot take part.
    """
    settings = {
        "number of nodes": str(num_nodes),
        "ranks a node": str(local_world_size),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "CUDA of torch": _cuda_of_torch(),
        "NCCL": _nccl(),
        "megappo": f"{_version('megappo')}, source {source_digest()}",
        **{name: json.dumps(value) for name, value in config.items()},
    }
    return NodeFacts(
        node=node, host=socket.gethostname(), address=address, settings=settings, problem=problem
    )


def source_digest() -> str:
    """Of all Python files of this package: two nodes with one version may have different files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def settings_digest(facts: NodeFacts) -> str:
    """Short name of everything that must be equal."""
    text = json.dumps(dict(facts.settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_problem(nodes: Sequence[NodeFacts]) -> str:
    """Why these nodes cannot train together, naming the odd ones; empty if they can.

    Args:
        nodes: all of the run's.
    """
    unfit = [f"{n.name}: {n.problem}" for n in nodes if n.problem]
    if unfit:
        return "\n".join(unfit)
    keys = list(dict.fromkeys(key for n in nodes for key in n.settings))
    lines = [line for key in keys if (line := _difference(key, nodes))]
    if not lines:
        return ""
    more = [f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n".join(
        [
            "the nodes are not alike, and would train wrongly or hang; give all the same files, "
            "packages and arguments:",
            *lines[:_MAX_LINES],
            *more,
        ]
    )


def _difference(key: str, nodes: Sequence[NodeFacts]) -> str:
    """One line on a setting that differs. What most nodes have counts as right, else node 0's."""
    values = [n.settings.get(key, "(nothing)") for n in nodes]
    (usual, count), *others = Counter(values).most_common()
    if not others:
        return ""
    told = []
    for value in (v for v in dict.fromkeys(values) if v != usual):
        odd = [n.name for n, found in zip(nodes, values, strict=True) if found == value]
        more = f" and {len(odd) - _MAX_NAMED} more" if len(odd) > _MAX_NAMED else ""
        verb = "have" if len(odd) > 1 else "has"
        told.append(f"{', '.join(odd[:_MAX_NAMED])}{more} {verb} {value}")
    rest = [n.name for n, found in zip(nodes, values, strict=True) if found == usual]
    of_rest = f"{rest[0]} has" if count == 1 else f"the other {count} nodes have"
    return f"  {key}: {'; '.join(told)}; {of_rest} {usual}"


def _cuda_of_torch() -> str:
    """As torch was built for; read from its file, since its import takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return _ABSENT
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return values.get("cuda") or "none: a CPU build"


def _nccl() -> str:
    """The package's version that torch loads; without one, the library's of the machine."""
    packages = [f"{name} {version}" for name in _NCCL_PACKAGES if (version := _found(name))]
    if packages:
        return ", ".join(packages)
    try:
        library = ctypes.CDLL(_NCCL_LIBRARY)
    except OSError:
        return _ABSENT
    code = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(code)) != 0:
        return "of unknown version"
    return spell_nccl(code.value)


def spell_nccl(code: int) -> str:
    """NCCL's own number, which is MMmmpp since 2.9: 22907 is 2.29.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _version(package: str) -> str:
    return _found(package) or _ABSENT


def _found(package: str) -> str:
    """Installed version; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
