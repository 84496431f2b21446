"""Packaging: `pip install -e .[cpu]`, `.[gpu]`, `.[dev]`, `.[tracking]`; pins: requirements/*.txt.

On a CPU machine SGLang is installed without its dependencies, which would bring a CUDA build of
torch, so the `cpu` extra alone is not enough: launch/setup_venv.sh does the whole of it.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pins(name: str) -> list[str]:
    """Requirement lines of one pin file, comments dropped."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


setup(
    name="megappo",
    version="0.1.0",
    description="PPO for large language models on Megatron-Core and SGLang, without a controller",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megappo", "megappo.*"]),
    package_data={"megappo.report": ["*.html", "*.css", "*.js"]},
    extras_require={name: pins(f"{name}.txt") for name in ("cpu", "gpu", "dev", "tracking")},
    entry_points={
        "console_scripts": ["megappo = megappo.cli:main"],
        "sglang.srt.platforms": ["megappo_cpu = megappo.rollout.sglang_platform:activate"],
        "sglang.srt.plugins": ["megappo_seeds = megappo.rollout.sglang_seeds:register"],
    },
)
