"""Running the quickstart as a user does, and the bar its result is held against."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from model_runtime.summary import RunSummary

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


def write_config(folder: Path, *, model: dict[str, Any] | None = None, **sections: Any) -> Path:
    """The quickstart's config with every path absolute, `model` merged into each model's section."""
    raw = yaml.safe_load((QUICKSTART / "config.yaml").read_text())
    for section in raw["multi_model"]["models"]:
        section["model_path"] = str(QUICKSTART / section["model_path"])
        for name, value in (model or {}).items():
            section[name] = section[name] | value if isinstance(value, dict) else value
    raw["workflow"] |= {
        "tasks": str(QUICKSTART / raw["workflow"]["tasks"]),
        "held_out_tasks": str(QUICKSTART / raw["workflow"]["held_out_tasks"]),
        "python_path": str(QUICKSTART),
    }
    raw["store"] = {"url": str(folder / "runs")}
    for name, value in sections.items():
        raw[name] = raw[name] | value if isinstance(raw.get(name), dict) else value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def run_up(
    folder: Path, config: Path, *arguments: str, limit_s: float = 900, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`repertory up CONFIG --json`, in a home of its own."""
    environment = os.environ | {"REPERTORY_HOME": str(folder / "home")} | (env or {})
    environment.pop("PREFECT_API_URL", None)
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli", "up", str(config), "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment,
        check=False,
    )


def export(folder: Path, store_url: str, run_id: str, model_id: str, into: Path) -> None:
    """`repertory export`, as somebody who has only the store."""
    command = [sys.executable, "-m", "deployments.cli", "export", run_id, model_id, "--to", str(into)]
    environment = os.environ | {"REPERTORY_HOME": str(folder / "another-home")}
    result = subprocess.run(
        [*command, "--store", store_url],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def summary_of(result: subprocess.CompletedProcess[str]) -> RunSummary:
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stderr[-6000:]}"
    return RunSummary.model_validate_json(result.stdout)


def below_the_bar(summary: RunSummary) -> list[str]:
    """What keeps this run from counting as one in which both policies learned; empty when nothing does."""
    missing = []
    for agent in summary.agents:
        start, end = agent.success.start, agent.success.end
        if start is None or end is None or end < 0.75 or end - start < 0.25:
            missing.append(f"{agent.agent_id}: success {start} → {end}; wanted ≥ 0.75, and 0.25 more")
    reward = summary.workflow_reward
    if reward.start is None or reward.end is None or reward.end < 3 * max(reward.start, 0.01):
        missing.append(f"workflow reward {reward.start} → {reward.end}; wanted three times as much")
    for model in summary.models:
        if model.versions_published < 5:
            missing.append(f"{model.model_id}: {model.versions_published} versions published; wanted ≥ 5")
    held_out = summary.held_out.reward if summary.held_out else None
    if held_out is None or held_out < 0.9:
        missing.append(f"held-out workflow reward {held_out}; wanted ≥ 0.9")
    return missing
