"""How far the agents' work is, in a number and a line."""

from __future__ import annotations

from typing import Literal

from model_runtime.workflow import DriverProgress
from tasks.rollout import describe, percent_of, skipped_tasks


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
