"""Writes docs/config.md, every config key with its type, default, meaning and verl's name for it.

python tools/config_docs.py          # a test holds that the file is up to date
"""

from __future__ import annotations

from pathlib import Path

from megappo.config import Config, SupervisedConfig
from megappo.config.fields import describe

HEADER = """\
# Configuration

Every key; this page is made from `megappo/config/` by `python tools/config_docs.py`. Set a key in
the YAML file or as `section.key=value` on the command line; later ones win. Unknown keys are
refused with the nearest known one. Where verl has the same setting under another name, that name is
answered with ours.

| key | type | default | meaning | verl's key |
|---|---|---|---|---|
"""


SUPERVISED = """
## Reward models and fine-tuning

The keys of `task: rm` and `task: sft` (`megappo train-rm`, `megappo train-sft`); [rlhf.md](rlhf.md)
says how they are used.

| key | type | default | meaning | verl's key |
|---|---|---|---|---|
"""


def table() -> str:
    """The page."""
    return HEADER + _rows(Config) + SUPERVISED + _rows(SupervisedConfig)


def _rows(cls: type) -> str:
    rows = []
    for d in describe(cls):
        kind = d.type.replace("|", "\\|")
        doc = d.doc.replace("|", "\\|")
        verl = f"`{d.verl}`" if d.verl else ""
        rows.append(f"| `{d.key}` | `{kind}` | `{d.default!r}` | {doc} | {verl} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("docs", "config.md").write_text(table())
