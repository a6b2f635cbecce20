"""What a terminal shows of a run: as it goes, and at its end."""

from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.console import Console

from deployments.live_view import cells, clock, live_table, plain_line
from deployments.summary_view import disk_use, print_summary, reasons
from deployments.up import TerminalView
from model_runtime.protocol import GatewayStatus, ModelRenewal, ModelStatus, QueueReport
from model_runtime.summary import AgentSummary, HeldOut, ModelSummary, Reward, RunSummary
from tests.fakes import make_gateway_status


def status(
    model_id: str = "solver_model", *, ready: bool = True, renewal: bool = True, **fields: Any
) -> ModelStatus:
    given: dict[str, Any] = {
        "model_id": model_id,
        "epoch": 1,
        "incarnation": 1,
        "seq": 9,
        "kind": "trainable",
        "status": "ready",
        "trainer_state": "running",
        "published_version": 4,
        "committed_version": 4,
        "step": 5,
        "limit": 12,
        "steps_left": 13,
        "queue": QueueReport(untrained_groups=7),
        "last_metrics": {
            "agent/search_agent/reward/mean": 0.5,
            "agent/answer_agent/reward/mean": 0.25,
            "training/off_policy/trajectory_staleness_worst/mean": 0.4,
        },
    }
    return ModelStatus(
        model_id=model_id,
        ready=ready,
        age_s=0.2,
        renewal=ModelRenewal.model_validate(given | fields) if renewal else None,
        used=7,
        waiting_requests=0,
        running_requests=3,
        finalized_rows=100,
        sampled_tokens=1000,
        tokens_per_s=51.7,
    )


def gateway(**models: ModelStatus) -> GatewayStatus:
    return make_gateway_status(
        run_id="r",
        models=models,
        open_groups=8,
        waiting_groups=1,
        open_sessions=64,
        settlements={"finalized": 412, "expired": 3, "infra": 0},
    )


def rendered(thing: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_models_row_has_all_that_is_asked_of_it() -> None:
    assert cells(status()) == ["solver_model", "training", "5/18", "0.38", "v4", "7/12", "0.4", "52"]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({"renewal": False}, "starting"),
        ({"status": "starting"}, "starting"),
        ({"status": "failed"}, "failed"),
        ({"status": "syncing"}, "syncing"),
        ({"ready": False}, "not ready"),
        ({"trainer_state": "waiting"}, "waiting for work"),
        ({"trainer_state": "waiting", "queue": QueueReport(untrained_groups=12)}, "waits for agents"),
        ({"trainer_state": "running", "queue": QueueReport(untrained_groups=12)}, "training"),
        ({"trainer_state": "no_signal"}, "no signal"),
        ({"kind": "frozen", "trainer_state": None}, "serving"),
    ],
)
def test_a_models_state_in_a_word(fields: dict[str, Any], state: str) -> None:
    assert cells(status(**fields))[1] == state


def test_the_table_names_the_run_the_dashboard_and_the_executions() -> None:
    table = live_table(
        gateway(solver_model=status()), run_id="shop-1", started_at=time.time() - 187, ui_url="http://ui"
    )
    text = rendered(table)
    assert re.search(r"shop-1 · 3:0\d · http://ui", text)
    assert "412 finalized" in text
    assert "3 expired" in text
    assert "infra" not in text
    assert "64 running in 8 groups, 1 more wait to open" in text


def test_the_table_is_whole_on_eighty_columns() -> None:
    table = live_table(gateway(solver_model=status()), run_id="r", started_at=time.time(), ui_url="http://ui")
    row = next(line for line in rendered(table, width=80).splitlines() if "solver_model" in line)
    assert row.split() == ["solver_model", "training", "5/18", "0.38", "v4", "7/12", "0.4", "52"]


def test_without_a_terminal_the_same_in_a_line() -> None:
    line = plain_line(gateway(solver_model=status()), started_at=time.time())
    assert "solver_model: training, step 5/18, reward 0.38, v4, queue 7/12, staleness 0.4, 52 tok/s" in line


def test_a_view_without_a_terminal_says_each_phase_once() -> None:
    console = Console(file=io.StringIO(), width=120)
    with TerminalView(console, run_id="r") as view:
        for phase in ("run r: pending", "run r: pending", "run r: running"):
            view.show(None, phase)
        view.show(gateway(solver_model=status()), "run r: running")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("run r: pending") == 1
    assert text.count("step 5/18") == 1


@pytest.mark.parametrize(("seconds", "shown"), [(7, "0:07"), (187, "3:07"), (3765, "1:02:45")])
def test_a_clock_reads_like_one(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_a_summary_prints_rewards_books_adapters_and_the_command() -> None:
    reward = Reward(start=0.05, end=0.91, num_values=1280)
    model = ModelSummary(
        model_id="solver_model",
        kind="trainable",
        reward=reward,
        success=reward,
        steps=20,
        versions_published=21,
        latest_version=20,
        finalized=100,
        trained=80,
        dropped={"zero_variance": 12, "expired": 0},
        in_log=8,
        balanced=False,
        adapter_uri="file:///runs/r/models/solver_model/versions/v20",
        serve_command="vllm serve /models/solver",
        ended="no_signal",
    )
    summary = RunSummary(
        run_id="shop-1",
        state="completed",
        failures={"planner_model": "Failed: out of memory"},
        epoch=1,
        duration_s=247,
        workflow_reward=reward,
        num_executions=1280,
        agents=[
            AgentSummary(agent_id="search_agent", model_id="solver_model", reward=reward, success=reward)
        ],
        models=[model],
        held_out=HeldOut(temperature=0.7, num_executions=40, reward=0.975),
        run_uri="file:///runs/r",
        summary_uri="file:///runs/r/summary.json",
        created_at=0.0,
    )
    console = Console(file=io.StringIO(), width=160)
    print_summary(console, summary)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for wanted in (
        "run shop-1: completed after 4 min 7 s",
        "0.05 → 0.91",
        "held-out tasks, at temperature 0.7, 40 executions: 0.97",
        "12: 12 zero_variance",
        "zero_variance: all rewards of the group were equal",
        "solver_model stopped after step 20: too many groups in a row had equal rewards",
        "BROKEN",
        "planner_model: Failed: out of memory",
        "solver_model adapter: file:///runs/r/models/solver_model/versions/v20",
        "serve one: vllm serve /models/solver",
    ):
        assert wanted in text, wanted


def test_the_store_s_use_is_told_by_part_the_largest_first() -> None:
    used = {"log": 4_000_000, "checkpoints": 8_100_000, "other": 200_000}
    assert disk_use(used) == "in the store: 12.3 MB (checkpoints 8.1, log 4.0, other 0.2)"
    assert disk_use(used, removed_log_bytes=41_020_000).endswith("); 41.0 MB of logs removed")


def test_drops_are_counted_with_their_reasons() -> None:
    assert reasons({"expired": 1, "aged_out": 2, "none": 0}) == "3: 2 aged_out, 1 expired"
    assert reasons({}) == "0"
