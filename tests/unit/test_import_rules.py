"""Layers import downward only; torch.distributed, Megatron and OmegaConf stay where they belong."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "megappo"
FILES = sorted(ROOT.rglob("*.py"))
FREE = {"types", "registry", "errors", "ppo"}
LEVEL = {
    "config": 0,
    "distributed": 1,
    "models": 2,
    "roles": 3,
    "rollout": 3,
    "rewards": 3,
    "data": 3,
    "checkpoint": 3,
    "loggers": 3,
    "planner": 3.5,
    "report": 4,
    "trainer": 4,
    "doctor": 4,
    "train": 5,
    "launch": 5,
    "node": 6,
    "cli": 6,
}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, and `torch.distributed` used as an attribute."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            found.add("torch.distributed")
    return found


def begins(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_the_package_is_found():
    assert len(FILES) > 60
    assert {part_of(p) for p in FILES} - {"__init__"} == set(LEVEL) | FREE


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward_only(path):
    part = part_of(path)
    if part == "__init__":
        return
    for name in imports(path):
        if not name.startswith("megappo."):
            continue
        other = name.split(".")[1]
        if other in FREE or other == part:
            continue
        assert part not in FREE, f"{path} is used by all layers and may not import {name}"
        assert LEVEL[other] < LEVEL[part], f"{part} may not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_process_groups_and_megatron_stay_in_their_layers(path):
    part = part_of(path)
    for name in imports(path):
        if begins(name, "megatron") or begins(name, "torch.distributed"):
            is_launcher = part == "launch" and begins(name, "torch.distributed")
            assert part in ("distributed", "models", "checkpoint") or is_launcher, (path, name)
        if begins(name, "omegaconf"):
            assert path == ROOT / "config" / "load.py"


@pytest.mark.parametrize("path", sorted((ROOT / "ppo").glob("*.py")), ids=lambda p: p.name)
def test_ppo_imports_torch_and_itself_only(path):
    allowed = ("torch", "megappo.ppo", "__future__", "math", "collections", "dataclasses", "typing")
    for name in imports(path):
        assert any(begins(name, a) for a in allowed), name
