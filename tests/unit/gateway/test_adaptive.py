"""Adaptive concurrency: the window as a state machine, what it does to admission, and the simulated claim."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.adaptive_concurrency import BUSY, RARE, compare, problems
from gateway.adaptive import ConcurrencyWindow, Signals
from gateway.admission import AdmissionState
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.errors import ConfigError
from model_runtime.gateway_config import AdaptiveConcurrencyConfig
from model_runtime.protocol import GroupRequest, ModelRenewal, QueueReport, ServerLoad
from tests.gateway_harness import GatewayHarness, live_gateway

WRITER = "e00001-00001"


def window(**settings: Any) -> ConcurrencyWindow:
    """Batches of 4, at most 20 groups."""
    return ConcurrencyWindow(
        AdaptiveConcurrencyConfig(enable=True, **settings), batch_groups=4, max_groups=20
    )


def at(second: float, **fields: Any) -> Signals:
    """A model that is neither hungry nor full nor congested, with its window used up."""
    values: dict[str, Any] = {
        "at": second,
        "untrained_groups": 4,
        "trainer_waits": False,
        "has_room": True,
        "num_in_flight": 100,
        "running_calls": 10,
    }
    return Signals(**values | fields)


HUNGRY: dict[str, Any] = {"trainer_waits": True, "untrained_groups": 0}


def test_a_hungry_model_gets_one_group_more_each_interval() -> None:
    w = window()
    assert [w.update(at(t, **HUNGRY)) for t in (0, 5, 10)] == ["hungry"] * 3
    assert w.groups == 4 + 3
    w.update(at(14.9, **HUNGRY))
    assert w.groups == 7, "too early to see what the last move did"


def test_a_window_never_grows_beyond_its_bound_nor_shrinks_below_a_batch() -> None:
    w = window()
    for t in range(0, 500, 5):
        w.update(at(t, **HUNGRY))
    assert w.groups == 20
    for t in range(500, 1000, 5):
        w.update(at(t, has_room=False))
    assert w.groups == 4


def test_a_window_that_is_not_used_up_does_not_grow() -> None:
    w = window()
    w.update(at(0, num_in_flight=3, **HUNGRY))
    assert w.groups == 4


@pytest.mark.parametrize(
    ("pressure", "signs"),
    [
        ("full", {"untrained_groups": 9}),
        ("full", {"has_room": False}),
        ("congested", {"kv_cache_use": 0.9}),
        ("congested", {"waiting_calls": 11}),
        ("congested", {"waiting_calls": 1, "running_calls": 0, **HUNGRY, "num_preemptions": 1}),
        ("congested", {"num_preemptions": 1}),
    ],
)
def test_what_piles_up_shrinks_the_window_by_a_factor(pressure: str, signs: dict[str, Any]) -> None:
    w = window()
    w.groups = 20
    w.update(at(0))
    assert w.update(at(5, **signs)) == pressure
    assert w.groups == 14
    assert w.moves == {pressure: 1}


def test_preemptions_count_as_they_happen_and_not_as_a_total() -> None:
    w = window()
    assert w.update(at(0, num_preemptions=7)) == "steady", "what was before is not known to be recent"
    assert w.update(at(5, num_preemptions=8)) == "congested"
    assert w.update(at(10, num_preemptions=8)) == "steady"
    assert w.update(at(15, num_preemptions=0)) == "steady", "a server that was restarted"


def test_a_hungry_model_does_not_grow_while_another_models_servers_are_congested() -> None:
    w = window()
    w.groups = 10
    assert w.update(at(0, **HUNGRY), others_congested=True) == "congested"
    assert w.groups == 7
    assert w.update(at(5), others_congested=True) == "steady"
    assert w.groups == 7, "who has enough is left alone"


def test_a_model_in_balance_keeps_its_window() -> None:
    w = window()
    assert {w.update(at(t)) for t in range(0, 100, 5)} == {"steady"}
    assert (w.groups, dict(w.moves)) == (4, {})


# ------------------------------------------------------------------ in admission


def config(**adaptive: Any) -> RunConfig:
    models = [
        {
            "model_id": name,
            "model_path": "/models/tiny",
            "batch_size": 2,
            "async_training": {"trigger_parameter_sync_step": 2, "staleness_threshold": 0},
        }
        for name in ("busy", "rare")
    ]
    return parse_config(
        {
            "multi_model": {"models": models},
            "agent_model_mapping": {"a": "busy", "b": "rare"},
            "workflow": {"group_size": 2, "max_concurrent_executions": 40},
            "gateway": {"adaptive_concurrency": adaptive},
        }
    )


class Machine:
    """Admission with a clock of its own."""

    def __init__(self, run: RunConfig) -> None:
        self.now, self.names = 0.0, iter(f"g{i}" for i in range(1000))
        self.state = AdmissionState(run, writer=WRITER, clock=lambda: self.now)

    def renew(self, model_id: str, *, untrained: int = 0, waits: bool = False, **load: Any) -> None:
        renewal = ModelRenewal(
            model_id=model_id,
            epoch=1,
            incarnation=1,
            seq=1,
            kind="trainable",
            status="ready",
            trainer_state="waiting" if waits else "running",
            queue=QueueReport(untrained_groups=untrained, feed_share=1.0 if model_id == "busy" else 0.1),
            load=ServerLoad(**load),
        )
        self.state.observe(renewal)

    def open_all(self) -> list[dict[str, bool]]:
        """Ask until nothing more opens; who trains on each group."""
        opened = []
        while True:
            self.state.join(GroupRequest(group_id=next(self.names), group_size=2))
            groups = self.state.admit(lambda _: True)
            if not groups:
                return opened
            opened += [group.train for group in groups]


def starved(run: RunConfig, *, seconds: int) -> list[dict[str, bool]]:
    """`busy` has all it may have; `rare` waits for data all the time."""
    machine, opened = Machine(run), []
    while machine.now < seconds:
        machine.renew("busy", untrained=4)
        machine.renew("rare", waits=True)
        opened += machine.open_all()
        machine.now += 5
    return opened


def test_a_starving_model_gets_workflows_beyond_the_surplus_and_the_full_one_piles_up_none() -> None:
    static, adaptive = starved(config(), seconds=100), starved(config(enable=True), seconds=100)
    assert len(static) == 2, "max_surplus_ratio counts from what busy trained on, which is nothing"
    assert len(adaptive) == 20, "as many as the driver runs at once"
    assert all(train == {"busy": False, "rare": True} for train in adaptive)


def test_windows_hold_no_budget_open() -> None:
    machine = Machine(config(enable=True))
    machine.renew("busy", untrained=4)
    machine.renew("rare", untrained=4, waits=True)
    assert machine.open_all() == []


def test_nothing_opens_for_full_models_when_they_are_to_be_waited_for() -> None:
    raw = config(enable=True)
    patient = raw.model_copy(update={"gateway": raw.gateway.model_copy(update={"max_surplus_ratio": 0})})
    assert starved(patient, seconds=50) == []


def test_congestion_of_one_models_servers_closes_the_others_window() -> None:
    machine = Machine(config(enable=True))
    for machine.now in range(0, 100, 5):
        machine.renew("busy", untrained=4)
        machine.renew("rare", waits=True)
        machine.open_all()
    windows = machine.state.concurrency.windows
    assert windows["rare"].groups == 20
    for machine.now in range(100, 200, 5):
        machine.renew("busy", untrained=4, kv_cache_use=0.95)
        machine.renew("rare", waits=True)
    assert windows["rare"].groups == 2
    assert windows["rare"].moves["congested"] > 3


def test_off_holds_nothing_back() -> None:
    machine = Machine(config())
    machine.renew("busy")
    machine.renew("rare")
    assert len(machine.open_all()) == 4 + 2 + 4, "busy's budget, and surplus for rare by the ratio"
    assert machine.state.concurrency.windows == {}


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_groups is 9, more than max_groups, 3"):
        config(enable=True, min_groups=9, max_groups=3)


# ------------------------------------------------------------------ shown, and the claim


def test_windows_and_what_runtimes_say_are_in_metrics_and_status(tmp_path: Any) -> None:
    from model_runtime.config import StoreConfig
    from model_runtime.store import open_store

    with live_gateway(open_store(StoreConfig(url=str(tmp_path))), config=config(enable=True)) as harness:
        show(harness)


def show(harness: GatewayHarness) -> None:
    load = {"num_running": 3, "num_waiting": 2, "kv_cache_use": 0.5, "num_preemptions": 7}
    harness.renew("busy", trainer_state="waiting", step=5, load=load, limit=4, queue={"untrained_groups": 1})
    text = harness.http.get("/metrics", headers=harness.admin).text
    for line in (
        'repertory_gateway_kv_cache_use{model="busy"} 0.5',
        'repertory_gateway_preemptions{model="busy"} 7.0',
        'repertory_gateway_server_waiting_requests{model="busy"} 2.0',
        'repertory_gateway_untrained_groups{model="busy"} 1.0',
        'repertory_gateway_training_step{model="busy"} 5.0',
        'repertory_gateway_window_groups{model="busy"} 2.0',
    ):
        assert line in text
    status = harness.http.get("/admin/status", headers=harness.admin).json()["models"]["busy"]
    assert (status["window"], status["pressure"]) == (2, "congested")


def test_in_simulation_the_rare_model_waits_half_as_long_or_less_and_no_token_lags_too_far() -> None:
    rows = [compare(seed, hours=1.0) for seed in range(3)]
    assert problems(rows) == []
    assert all(row["adaptive"]["steps"][RARE] > row["static"]["steps"][RARE] for row in rows)
    assert all(row["adaptive"]["mean_lag"][BUSY] <= row["static"]["mean_lag"][BUSY] for row in rows)
