"""What the benchmarks of evaluations and of reporting conclude from what was recorded."""

from __future__ import annotations

import pytest

from benchmarks import evaluation_cost, reporting_cost
from benchmarks.evaluation_cost import Amount, Span, window_of
from benchmarks.reporting_cost import Mark, losses, summarized


def test_tokens_count_for_the_part_of_their_time_that_lies_in_the_window() -> None:
    amount = Amount(10.0, 20.0, 100.0)
    assert amount.within(Span(False, 0.0, 30.0)) == 100.0
    assert amount.within(Span(False, 15.0, 17.0)) == pytest.approx(20.0)
    assert amount.within(Span(False, 18.0, 30.0)) == pytest.approx(20.0)
    assert amount.within(Span(False, 20.0, 30.0)) == 0.0


def test_an_evaluation_s_cost_is_its_drop_beyond_its_share_of_the_sampled_tokens() -> None:
    def of(began: float, trained: float, evaluated: float) -> evaluation_cost.Window:
        span = Span(evaluated > 0, began, began + 10)
        amounts = [[Amount(began, began + 10, n)] for n in (trained, 100 - evaluated, evaluated)]
        return window_of(span, *amounts)

    result = evaluation_cost.result_of([of(0, 900, 0), of(10, 650, 25), of(20, 1100, 0)])
    assert result["shares"] == [pytest.approx(0.25)]
    assert result["drops_of_trained"] == [pytest.approx(0.35)], "against the mean of the windows around it"
    assert result["median_beyond_share"] == pytest.approx(0.10)


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


def test_a_loss_is_what_a_step_takes_longer_than_in_the_windows_before_and_after() -> None:
    def of(cpu_ms: float, stood_ms: float, *, reported: bool = False) -> reporting_cost.Window:
        return reporting_cost.Window(reported, 10, 1.0, cpu_ms, stood_ms, 0, 0)

    slower = [of(90, 10), of(94, 19, reported=True), of(95, 25), of(140, 0, reported=True), of(150, 10)]
    assert losses(slower) == [pytest.approx(113 / 110 - 1), pytest.approx(0.0)]
