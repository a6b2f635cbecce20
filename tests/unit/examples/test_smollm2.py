"""The tool calls SmolLM2 learns: what they earn, and the curve that is drawn of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from model_runtime.config_file import load_config
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workflow import RolloutDriver
from tests.fake_gateway import FakeGateway, serving

FOLDER = Path(__file__).parents[3] / "examples" / "smollm2"
WANTED = {"name": "translate", "arguments": {"word": "house", "language": "French"}}
KEY = "admin-key-of-this-test"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool_calls() -> ModuleType:
    return load("tool_calls")


@pytest.fixture
def imported_afresh() -> Iterator[None]:
    yield
    sys.modules.pop("tool_calls", None)


def call(**parts: Any) -> str:
    return json.dumps(WANTED | parts)


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        (call(), 1.0),
        (call(name="get_price"), 0.7),
        (call(arguments={"word": "house"}), 0.85),
        (call(arguments={"word": "house", "language": "French", "city": "Oslo"}), 0.9),
        (call(arguments={}), 0.7),
        (call(arguments="house"), 0.2),
        (call(comment="so"), 0.2),
        ('{"name": "translate"}', 0.2),
        ('["translate"]', 0.0),
        (call() + " Here you are.", 0.0),
        ("Maison.", 0.0),
        ("", 0.0),
    ],
)
def test_each_part_of_a_call_earns_its_share(tool_calls: ModuleType, content: str, reward: float) -> None:
    assert tool_calls.grade(content, WANTED) == pytest.approx(reward)


def test_a_number_may_be_written_as_one(tool_calls: ModuleType) -> None:
    wanted = {"name": "set_timer", "arguments": {"minutes": "25"}}
    assert tool_calls.grade('{"name": "set_timer", "arguments": {"minutes": 25}}', wanted) == 1.0


def test_the_task_files_are_those_the_program_writes_and_held_out_values_are_never_trained(
    tool_calls: ModuleType,
) -> None:
    files = {
        name: [json.loads(line) for line in (FOLDER / "tasks" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("calls", "calls_held_out")
    }
    together = [task["question"] for tasks in files.values() for task in tasks]
    assert sorted(together) == sorted(task["question"] for task in tool_calls.all_tasks())
    for task in files["calls"]:
        assert not set(task["call"]["arguments"].values()) & tool_calls.HELD_OUT_VALUES


@pytest.mark.usefixtures("imported_afresh")
async def test_an_agent_that_always_answers_like_the_example_earns_part_of_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool_calls: ModuleType
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, KEY)
    config = load_config(FOLDER / "learn.yaml")
    store = open_store(config.store.model_copy(update={"url": str(tmp_path)}))
    async with serving(FakeGateway(lambda *_: tool_calls.EXAMPLE[1]), admin_key=KEY) as gateway:
        driver = RolloutDriver(config, run_id="r", gateway_url=gateway.url, store=store, mode="eval")
        report = await driver.run()
    assert report.executions == {"finalized": 24}
    assert report.agent_success == {"tool_agent": 0.0}
    assert report.mean_reward == pytest.approx(0.4 + 0.3 * 6 / 24)  # six ask for the weather, elsewhere


def test_the_curve_is_drawn_from_the_run_s_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load((FOLDER / "learn.yaml").read_text()) | {"store": {"url": str(tmp_path / "runs")}}
    config = tmp_path / "learn.yaml"
    config.write_text(yaml.safe_dump(raw))
    layout = RunLayout("r").model("tool_model")
    writer = MetricsWriter(open_store(load_config(config).store), layout, "steps", epoch=1, incarnation=1)
    for step in range(1, 8):
        row = {"step": step, "time": 60.0 * step, "timing_s/step": 60.0, "response_length/mean": 20.0}
        writer.append(row | {"agent/tool_agent/reward/mean": step / 10})
    curve = load("curve")
    monkeypatch.setattr(
        sys, "argv", ["curve.py", "r", "--config", str(config), "--out", str(tmp_path / "curve.png")]
    )
    curve.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["| 1–5 | 0.30 | 20 | 5 |", "| 6–7 | 0.65 | 20 | 7 |"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(sys, "argv", ["curve.py", "absent", "--config", str(config)])
    with pytest.raises(SystemExit, match="absent holds no step of tool_model"):
        curve.main()
