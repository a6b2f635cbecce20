"""The tests that pages of the documentation name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]*test_\w+\.py)::(test_\w+)`")


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize(("page", "at_least"), [("gateway.md", 80), ("guarantees.md", 80)])
def test_every_test_a_page_names_exists(page: str, at_least: int) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = NAMED.findall(text)
    assert len(named) > at_least
    assert len(named) == text.count("::test_"), "a test is named in a form that is not looked for"
    missing = []
    for file, name in named:
        path = ROOT / file if "/" in file else ROOT / "tests" / "unit" / "gateway" / file
        if not path.is_file() or name not in functions_of(path):
            missing.append(f"{file}::{name}")
    assert missing == []
