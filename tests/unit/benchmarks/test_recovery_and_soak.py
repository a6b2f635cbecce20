"""What the recovery and soak benchmarks conclude from what they see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import recovery
from benchmarks.recovery import NOTHING, Recovery, Rehearsal, shown
from benchmarks.soak import LIMITS, MAX_REMEMBERED, Sample, growth
from tests.chaos.driver import MODELS
from tests.chaos.victims import Fault


class Scripted(Rehearsal):
    """A run of which each look is written down; a tick is a second."""

    def __init__(self, tokens: list[dict[str, int]], steps: list[int]) -> None:
        self.now = 0
        self.hit: list[Fault] = []
        self._script = tokens, steps

    def strike(self, fault: Fault) -> None:
        self.hit.append(fault)

    def tick(self) -> None:
        self.now += 1

    def _tokens(self) -> dict[str, int]:
        tokens = self._script[0]
        return tokens[min(self.now, len(tokens) - 1)]

    def _steps(self) -> dict[str, int]:
        steps = self._script[1]
        return dict.fromkeys(MODELS, steps[min(self.now, len(steps) - 1)])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Scripted]:
    runs: list[Scripted] = []
    monkeypatch.setattr(recovery, "time", SimpleNamespace(monotonic=lambda: float(runs[-1].now)))
    return runs


def each(number: int) -> dict[str, int]:
    return dict.fromkeys(MODELS, number)


def test_a_run_is_back_when_every_model_goes_on_and_its_longest_silence_is_told(
    clock: list[Scripted],
) -> None:
    """Killed at 0; tokens that were under way come at 1, then there are none of one model until 12."""
    tokens = [each(100), each(110), *[{}] * 5, *[each(120) | {MODELS[0]: 110}] * 5]
    tokens += [each(n) for n in range(130, 160)]
    steps = [5] * 14 + list(range(6, 60))
    clock.append(Scripted(tokens, steps))
    assert clock[-1].recover("gateway") == Recovery("gateway", 11.0, 14.0)
    assert [fault.how for fault in clock[-1].hit] == ["SIGKILL"]


def test_a_count_that_began_anew_is_a_token_too(clock: list[Scripted]) -> None:
    tokens = [each(100), each(0), *[each(n) for n in range(3, 60)]]
    clock.append(Scripted(tokens, list(range(60))))
    assert clock[-1].recover("gateway") == Recovery("gateway", 2.0, 1.0)


def test_what_does_not_come_back_is_given_up(clock: list[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LIMIT_S", 40.0)
    clock.append(Scripted([each(100)], list(range(60))))
    assert clock[-1].recover(NOTHING) == Recovery(NOTHING, None, 1.0)
    assert clock[-1].hit == []
    assert shown([None]) == "not within 40 s"
    assert shown([1.0, 3.0]) == "2.0 s (1-3)"


def sample(trajectories: int, *, gateway_mib: float = 100.0, queue_mib: float = 100.0) -> Sample:
    return Sample(trajectories, gateway_mib, queue_mib, 50, 10.0, 100.0, 20.0)


def test_memory_counts_from_where_everything_bounded_is_full() -> None:
    filling = [sample(n * MAX_REMEMBERED // 2, gateway_mib=100.0 + 40 * min(n, 3)) for n in range(1, 21)]
    assert growth(filling)["gateway MiB"] == pytest.approx(1.0)
    leaking = [sample(n * MAX_REMEMBERED // 2, gateway_mib=100.0 + 40 * n) for n in range(1, 21)]
    assert growth(leaking)["gateway MiB"] > LIMITS["gateway MiB"]
    assert set(growth(filling)) == set(LIMITS)


def test_a_series_too_short_to_fill_it_counts_from_its_tenth() -> None:
    leaking = [sample(n * 50, gateway_mib=100.0 + 10 * n) for n in range(1, 21)]
    assert growth(leaking)["gateway MiB"] == pytest.approx(300 / 120)


def test_a_queue_that_fills_and_empties_is_told_from_one_that_grows() -> None:
    filling = [sample(n * 50, queue_mib=100.0 + 25 * (n % 8)) for n in range(1, 21)]
    assert growth(filling)["queue MiB"] == pytest.approx(1.0)
    leaking = [sample(n * 50, queue_mib=100.0 + 25 * (n % 8) + 10 * n) for n in range(1, 21)]
    assert growth(leaking)["queue MiB"] > LIMITS["queue MiB"]
