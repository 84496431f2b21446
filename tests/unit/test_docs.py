"""Documents that are made from code are up to date, and what the README names exists."""

import importlib.util
import re
from pathlib import Path

from megappo.config import Config
from megappo.config.fields import describe
from megappo.models.families import FAMILIES
from megappo.models.families.refused import REFUSED

ROOT = Path(__file__).parents[2]


def test_the_config_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "tools" / "config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "config.md").read_text() == module.table()


def test_the_readmes_table_of_verls_keys_is_true():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", text, flags=re.MULTILINE)
    assert len(rows) > 15
    ours = {d.verl: d.key for d in describe(Config) if d.verl}
    for verl, key in rows:
        assert ours[verl] == key


def test_the_page_of_families_has_each_once():
    text = (ROOT / "docs" / "families.md").read_text()
    cells = re.findall(r"^\| (`[^|]+`) \|.*\| (?:yes|dense|) *\|$", text, flags=re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted([*FAMILIES, *REFUSED])


def test_files_that_the_documents_link_to_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert len(pages) > 8
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
