"""How far the agents' work is, in a number and a line."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Literal

import pytest
from prefect.exceptions import TerminationSignal

from model_runtime.config import StoreConfig
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import open_store
from model_runtime.workflow import DriverProgress
from tasks import rollout
from tasks.rollout import RolloutReporter, describe, percent_of, skipped_tasks
from tests.fake_gateway import FakeGateway, serving
from tests.unit.model_runtime.test_workflow import KEY, RUN, make_config


def progress(mode: Literal["train", "eval"], *, opened: int = 0, **executions: int) -> DriverProgress:
    return DriverProgress(
        mode=mode, groups_total=40, groups_opened=opened, executions=executions, running=3, mean_reward=0.5
    )


def test_training_is_as_far_as_its_groups_are_opened() -> None:
    half = progress("train", opened=20, finalized=150, expired=2)
    assert percent_of(half) == 50.0
    assert describe(half) == (
        "20 of 40 groups opened, 3 executions running; 2 expired, 150 finalized; mean reward 0.50"
    )


def test_skipped_tasks_are_listed_and_a_long_list_is_cut() -> None:
    assert skipped_tasks(()) == ""
    assert skipped_tasks((3,)) == "; 1 task skipped, never finished: 3"
    assert skipped_tasks((3, 17, 21), shown=2) == "; 3 tasks skipped, never finished: 3, 17, …"


def test_an_evaluation_opens_no_groups_and_is_as_far_as_its_executions_are_done() -> None:
    begun = progress("eval", finalized=9, aborted=1)
    assert percent_of(begun) == 25.0
    assert describe(begun).startswith("40 executions to do, 3 executions running; 1 aborted, 9 finalized")
    assert percent_of(progress("eval", finalized=41)) == 100.0, "an execution tried twice counts twice"


async def test_the_runner_s_sigterm_in_the_middle_of_a_workflow_ends_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, KEY)
    config, store = make_config(tmp_path, num_tasks=1), open_store(StoreConfig(url=str(tmp_path / "store")))

    async def struck(*_: Any) -> float:
        raise TerminationSignal(signal.SIGTERM)  # Prefect's handler does, wherever the process stands

    monkeypatch.setattr("model_runtime.workflow.load_workflow", lambda _: struck)
    async with serving(FakeGateway(), admin_key=KEY) as gateway:
        with pytest.raises(TerminationSignal):
            await rollout.drive.fn(
                config,
                run_id=RUN,
                gateway_url=gateway.url,
                store=store,
                mode="train",
                reporter=RolloutReporter(config, "train"),
            )
    assert gateway.settled("aborted") == []
