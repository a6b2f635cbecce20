"""What is said of the examples in their README, and the examples that need more than this machine has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import StoreConfig
from model_runtime.config_file import load_config
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workflow import RolloutDriver
from model_runtime.workflow_tasks import load_workflow
from tests.fake_gateway import FakeGateway, serving

EXAMPLES = Path(__file__).parents[3] / "examples"
KEY = "admin-key-of-this-test"


def test_the_readme_shows_the_program_that_is_there_in_at_most_30_lines() -> None:
    program = (EXAMPLES / "one_file.py").read_text()
    shown = re.search(r"```python\n(.*?)```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] == program
    assert len(program.splitlines()) <= 30


def test_the_agents_shown_are_the_programs_that_are_there() -> None:
    programs = {path.name: path.read_text() for path in (EXAMPLES / "agents").glob("with_*.py")}
    shown = re.findall(
        r"```python\n(.*?)```", (EXAMPLES.parent / "docs" / "agents.md").read_text(), re.DOTALL
    )
    assert sorted(shown) == sorted(programs.values())
    assert all(len(program.splitlines()) <= 30 for program in programs.values())


def test_the_program_s_config_is_valid_and_names_its_own_workflow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    class Summary:
        headline = "done"

    import deployments.up

    monkeypatch.setattr(deployments.up, "train", lambda config: given.append(config) or Summary())
    source = (EXAMPLES / "one_file.py").read_text()
    script = tmp_path / "one_file.py"
    script.write_text(source)
    exec(compile(source, str(script), "exec"), {"__name__": "__main__", "__file__": str(script)})

    (config,) = given
    assert load_workflow(config.workflow).__name__ == "run"
    assert len((tmp_path / "one_file.jsonl").read_text().splitlines()) == 30
    assert [m.model_id for m in config.models] == ["planner_model", "solver_model"]


@pytest.mark.parametrize("name", ["quickstart/config.yaml", "smollm2/config.yaml", "smollm2/learn.yaml"])
def test_each_config_is_valid_without_a_warning_and_its_files_are_there(name: str) -> None:
    config = load_config(EXAMPLES / name)
    assert config.warnings() == []
    for path in (config.workflow.tasks, config.workflow.held_out_tasks):
        assert path is not None
        assert Path(path).is_file()
    num_tasks = len(Path(config.workflow.tasks or "").read_text().splitlines())
    needed = num_tasks * config.workflow.epochs
    for model in config.trainable_models:
        assert model.max_steps is not None
        assert needed >= 2 * model.batch_size * model.max_steps


async def test_the_workflow_on_real_weights_gives_graded_rewards_for_every_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, KEY)
    config = load_config(EXAMPLES / "smollm2" / "config.yaml")

    def speak(agent_id: str, messages: list[dict[str, Any]]) -> str:
        told = re.findall(r"says: (\d+)", messages[-1]["content"])
        return {"planner_agent": "price", "search_agent": told[0] if told else "the sofa"}.get(
            agent_id, "no idea"
        )

    async with serving(FakeGateway(speak), admin_key=KEY) as gateway:
        store = open_store(StoreConfig(url=str(tmp_path)))
        report = await RolloutDriver(
            config, run_id="r", gateway_url=gateway.url, store=store, mode="eval"
        ).run()

    lines = (EXAMPLES / "smollm2" / "tasks" / "held_out.jsonl").read_text().splitlines()
    prices = sum(json.loads(line)["column"] == "price" for line in lines)
    assert report.executions == {"finalized": len(lines)}
    assert report.agent_success["planner_agent"] == pytest.approx(0.3 + 0.7 * prices / len(lines))
    assert report.agent_success["search_agent"] == pytest.approx(0.7)
    assert report.agent_success["answer_agent"] == pytest.approx(0.4)
    assert {len(s.calls) for s in gateway.history} == {4}


def test_held_out_tasks_on_real_weights_are_never_trained_on() -> None:
    folder = EXAMPLES / "smollm2" / "tasks"
    train, held_out = (set((folder / f"{n}.jsonl").read_text().splitlines()) for n in ("train", "held_out"))
    assert not train & held_out
