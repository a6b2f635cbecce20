"""Pages that are made from the code, and the links between pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["configuration.md", "metrics.md"])
def test_a_page_made_from_the_code_is_current(name: str) -> None:
    page = generator().PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == page, "run `make docs`"


def test_every_setting_says_what_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", generator().configuration(), re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, text in rows if not text.strip()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [target for target in targets if "://" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []
