"""Pages that are made from the code, and the links between pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

from deployments.cli import app
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.config_file import parse_config

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


def yaml_blocks() -> list[Any]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [
            pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
            for number, block in enumerate(blocks)
        ]
    return found


@pytest.mark.parametrize("block", yaml_blocks())
def test_what_pages_show_of_a_config_is_valid(block: str) -> None:
    """A whole config as it stands; a part of one in its place."""
    shown = yaml.safe_load(block)
    if set(shown) <= set(ModelConfig.model_fields):
        shown = {"multi_model": {"models": [{"model_id": "a", "model_path": "a"} | shown]}}
    assert set(shown) <= set(RunConfig.model_fields)
    section = shown.setdefault("multi_model", {"models": [{"model_id": "a", "model_path": "a"}]})
    shown.setdefault("agent_model_mapping", {m["model_id"]: m["model_id"] for m in section["models"]})
    parse_config(shown)


def shown_commands(page: Path) -> set[tuple[str, str]]:
    """(subcommand, option) of every `repertory …` of a page, with "" for the subcommand alone."""
    found: set[tuple[str, str]] = set()
    for words in re.findall(r"(?:^|(?<!-n)[\s/`])repertory (\w[^`#;&|\n]*)", page.read_text()):
        subcommand = words.split()[0]
        found |= {(subcommand, ""), *((subcommand, option) for option in re.findall(r"--[\w-]+", words))}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_is_there_with_its_options(page: Path) -> None:
    commands: Any = typer.main.get_command(app)
    known = {
        (name, option)
        for name, command in commands.commands.items()
        for option in ("", *(o for p in command.params for o in (*p.opts, *p.secondary_opts)))
    }
    assert shown_commands(page) - known == set()


def test_pages_show_most_commands() -> None:
    shown = {subcommand for page in PAGES for subcommand, _ in shown_commands(page)}
    assert len(shown) >= 9
