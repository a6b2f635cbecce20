"""What the benchmarks of evaluations and of reporting conclude from what was recorded."""

from __future__ import annotations

import pytest

from benchmarks import reporting_cost
from benchmarks.reporting_cost import Mark, losses, summarized


def test_a_window_of_reporting_runs_from_its_first_publish_to_its_last() -> None:
    marks = [Mark(v, at=float(v), trainer_cpu_s=v * 0.5, flow_cpu_s=v * 0.1, server_cpu_s=0) for v in (3, 7)]
    rows = [
        {"step": n, "time": float(n), "timing_s/step": 0.5, "timing_s/commit_version": 0.2} for n in range(10)
    ]
    window = summarized(True, marks, rows)
    assert (window.num_versions, window.steps_per_s) == (4, 1.0)
    assert window.trainer_cpu_ms == pytest.approx(500)
    assert window.flow_cpu_ms == pytest.approx(100)
    assert window.stood_ms == pytest.approx(300), "a second a step, of which 0.7 are accounted for"


def test_steps_are_lost_against_the_windows_before_and_after() -> None:
    def of(steps_per_s: float, *, reported: bool = False) -> reporting_cost.Window:
        return reporting_cost.Window(reported, 10, steps_per_s, 0, 0, 0, 0)

    slower = [of(4.0), of(3.6, reported=True), of(3.5), of(3.0, reported=True), of(2.5)]
    assert losses(slower) == [pytest.approx(0.04), pytest.approx(0.0)]
