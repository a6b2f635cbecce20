"""The parent's decisions, on fakes of its children and its gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Completed, Crashed, Failed

from flows import multi_model_training as module
from flows.multi_model_training import (
    Run,
    anyone_trains,
    drain,
    evaluate,
    follow,
    run_id_for,
    stop_children,
    watch_children,
)
from model_runtime.config import RunConfig
from model_runtime.coordinator import CheckpointCoordinator, begin_run, claim_epoch, read_desired
from model_runtime.errors import ProcessError, RunFailedError, StoreOutageError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.patient_store import PatientStore
from model_runtime.protocol import GatewayStatus, ModelRenewal, ModelStatus
from model_runtime.store import HIDDEN, Store
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Shard
from tasks import hang_watch, model_failure
from tasks.children import Child
from tasks.hang_watch import HangWatch
from tests.fakes import make_gateway_status, make_trajectory

LAYOUT = RunLayout("run-1")


def config(**changes: Any) -> RunConfig:
    raw: dict[str, Any] = {
        "multi_model": {"models": [{"model_id": m, "model_path": f"/{m}"} for m in ("a", "b")]},
        "agent_model_mapping": {"x": "a", "y": "b"},
        "workflow": {"function": "m:f", "tasks": "/t", "held_out_tasks": "/h"},
    }
    return RunConfig.model_validate(raw | changes)


def model_status(model_id: str, **renewal: Any) -> ModelStatus:
    defaults: dict[str, Any] = {
        "model_id": model_id,
        "epoch": 1,
        "incarnation": 1,
        "seq": 1,
        "kind": "trainable",
        "status": "ready",
        "trainer_state": "running",
        "committed_version": 3,
        "published_version": 3,
    }
    return ModelStatus(
        model_id=model_id,
        ready=True,
        age_s=0.1,
        renewal=ModelRenewal.model_validate(defaults | renewal),
        used=0,
        waiting_requests=0,
        running_requests=0,
        finalized_rows=0,
        sampled_tokens=0,
        tokens_per_s=0,
    )


class FakeGateway:
    """Notes what is wanted; its status is whatever `models` say."""

    url = "http://gateway"

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.failed_models: set[str] = set()
        self.models: dict[str, ModelStatus] | None = {m: model_status(m) for m in ("a", "b")}
        self.heard = {"rollout": 0.1}
        self.admin = SimpleNamespace(status=self._status)

    async def want(self, state: str, reason: str) -> None:
        self.wanted.append(state)

    async def _status(self) -> GatewayStatus | None:
        if self.models is None:
            return None
        return make_gateway_status(models=self.models, heard_s=self.heard)


class FakePrefect:
    """Flow runs that end when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self._ends: dict[str, Any] = {}
        monkeypatch.setattr(module, "start_child", self._start)
        monkeypatch.setattr(module, "look", self._look)
        monkeypatch.setattr(module, "restart_if_lost", self._restart)
        monkeypatch.setattr(module, "POLL_S", 0.001)

    def end(self, role: str, state: Any) -> None:
        self._ends[role] = state

    async def _start(self, child: Child) -> None:
        child.flow_run_id, child.final = uuid4(), None
        self.started.append(child.role)

    async def _look(self, children: list[Child]) -> list[Child]:
        ended = [c for c in children if c.final is None and c.role in self._ends]
        for child in ended:
            child.final = FlowRun.model_construct(id=child.flow_run_id, state=self._ends.pop(child.role))
            child.history.append(child.outcome)
        return ended

    async def _restart(self, child: Child) -> bool:
        if child.lost and child.incarnation == 1:
            child.incarnation = 2
            await self._start(child)
            return True
        return False


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> FakePrefect:
    return FakePrefect(monkeypatch)


async def make_run(store: Store, settings: RunConfig) -> Run:
    claim_epoch(store, LAYOUT)
    begin_run(store, LAYOUT, settings, epoch=1)
    run = Run(
        config=settings,
        run_id="run-1",
        epoch=1,
        store=store,
        layout=LAYOUT,
        gateway=FakeGateway(),  # type: ignore[arg-type]
        gateway_task=asyncio.create_task(asyncio.sleep(60)),
        models={},
        coordinator=CheckpointCoordinator(store, LAYOUT, ("a", "b"), 1),
        hang_watch=HangWatch(lease_s=10.0),
    )
    await module.start_children(run)
    return run


@pytest.fixture
async def run(local_store: Store, prefect: FakePrefect) -> Any:
    made = await make_run(local_store, config())
    yield made
    made.gateway_task.cancel()


async def within(work: Any, limit_s: float = 5) -> Any:
    return await asyncio.wait_for(work, limit_s)


def test_a_run_without_a_name_is_named_by_its_flow_run() -> None:
    assert run_id_for(config(name="shop"), "", "0f3c9a12-aaaa") == "shop-0f3c9a12"
    assert run_id_for(config(), "mine", "0f3c9a12-aaaa") == "mine"


async def test_every_model_and_the_work_get_a_flow_run_of_their_own(run: Run, prefect: FakePrefect) -> None:
    assert prefect.started == ["a", "b", "rollout"]
    child = run.models["a"]
    assert child.deployments == ("model-runtime/a", "model-runtime/default")
    assert child.idempotency_key == "run-1:a:1"
    assert child.tags == ["run:run-1", "config:default", "model:a"]
    assert child.parameters["config"]["workflow"]["function"] == "m:f"


async def test_the_run_is_followed_until_the_work_is_done(run: Run, prefect: FakePrefect) -> None:
    following = asyncio.create_task(follow(run))
    await asyncio.sleep(0.05)
    assert not following.done()
    prefect.end("rollout", Completed())
    await within(following)
    assert run.failures == {}


async def test_one_models_failure_leaves_the_others_going(run: Run, prefect: FakePrefect) -> None:
    following = asyncio.create_task(follow(run))
    prefect.end("a", Failed(message="CUDA out of memory"))
    await asyncio.sleep(0.05)
    assert run.failures == {"a": "Failed: CUDA out of memory"}
    assert run.gateway.failed_models == {"a"}
    assert not following.done()
    prefect.end("b", Failed(message="too"))
    await within(following)


async def test_by_the_config_one_models_failure_stops_the_run(
    local_store: Store, prefect: FakePrefect
) -> None:
    raw = config().model_dump()
    raw["multi_model"]["on_model_failure"] = "stop"
    run = await make_run(local_store, RunConfig.model_validate(raw))
    following = asyncio.create_task(follow(run))
    prefect.end("a", Crashed())  # lost, not failed: started again
    await asyncio.sleep(0.05)
    assert not following.done()
    prefect.end("a", Failed(message="CUDA out of memory"))
    with pytest.raises(RunFailedError, match=r"a failed and .*on_model_failure is stop.*CUDA out of memory"):
        await within(following)
    run.gateway_task.cancel()


async def test_a_run_whose_other_models_find_nothing_to_train_ends_too(
    local_store: Store, prefect: FakePrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_failure, "LOOK_EVERY_S", 0.001)
    raw = config().model_dump()
    raw["multi_model"]["idle_limit_s"] = 0.2
    run = await make_run(local_store, RunConfig.model_validate(raw))
    models = run.gateway.models  # type: ignore[attr-defined]
    following = asyncio.create_task(follow(run))
    await asyncio.sleep(0.3)
    assert not following.done(), "nobody has failed"
    prefect.end("a", Failed(message="CUDA out of memory"))
    for step in range(10, 20):
        models["b"] = model_status("b", step=step)
        await asyncio.sleep(0.04)
    assert not following.done(), "the other one trains"
    with pytest.raises(RunFailedError, match=r"a failed and no other trained a step for 0\.2 s.*CUDA out of"):
        await within(following)
    run.gateway_task.cancel()


async def test_a_lost_model_is_started_again_and_is_no_failure(run: Run, prefect: FakePrefect) -> None:
    prefect.end("a", Crashed())
    await watch_children(run)
    assert prefect.started.count("a") == 2
    assert run.failures == {}
    prefect.end("a", Crashed(message="again"))
    await watch_children(run)
    assert run.failures == {"a": "Crashed: again"}


@pytest.fixture
def ended(prefect: FakePrefect, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Roles that an impatient hang watch ended."""
    monkeypatch.setattr(hang_watch, "LISTEN_EVERY_S", 0.001)
    monkeypatch.setattr(hang_watch, "SILENT_LIMIT_S", 0.01)
    roles: list[str] = []

    async def end(child: Child, limit_s: float) -> None:
        child.ending = True
        roles.append(child.role)
        prefect.end(child.role, Cancelled())

    monkeypatch.setattr(hang_watch, "_end_if_begun", end)
    return roles


async def test_a_model_that_hangs_is_ended_and_started_again_and_is_no_failure(
    run: Run, ended: list[str]
) -> None:
    models = run.gateway.models  # type: ignore[attr-defined]
    models["b"] = models["b"].model_copy(update={"age_s": 500.0})
    async with asyncio.timeout(10):
        while run.models["b"].incarnation == 1:
            await watch_children(run)
            await asyncio.sleep(0.002)
    assert ended == ["b"]
    assert run.failures == {}
    assert run.models["a"].incarnation == 1


@pytest.mark.parametrize("last_heard", [{}, {"rollout": 500.0}])
async def test_a_driver_that_hangs_is_ended_and_started_again_and_is_no_failure(
    local_store: Store, ended: list[str], last_heard: dict[str, float]
) -> None:
    run = await make_run(local_store, config())
    assert run.rollout is not None
    assert run.rollout.busy_limit_s == run.config.workflow.execution_timeout_s
    run.rollout.busy_limit_s = 0.02
    run.gateway.heard = last_heard  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while run.rollout.incarnation == 1:
            await watch_children(run)
            await asyncio.sleep(0.002)
    assert ended == ["rollout"]
    assert run.failures == {}
    run.gateway_task.cancel()


async def test_a_gateway_that_does_not_answer_makes_nobody_seem_to_hang(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_watch, "LISTEN_EVERY_S", 0.0)
    monkeypatch.setattr(hang_watch, "SILENT_LIMIT_S", 0.0)
    run.gateway.models = None  # type: ignore[attr-defined]
    for _ in range(5):
        await watch_children(run)
    assert [child.silent_s for child in run.models.values()] == [0.0, 0.0]


async def test_a_gateway_that_was_given_up_ends_the_run(run: Run) -> None:
    async def fail() -> None:
        raise ProcessError("the gateway died; giving up")

    run.gateway_task.cancel()
    run.gateway_task = asyncio.create_task(fail())
    with pytest.raises(ProcessError, match="giving up"):
        await within(follow(run))


async def test_a_newer_epoch_ends_the_older_one(
    run: Run, local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_UP_EVERY_S", 0)
    claim_epoch(local_store, LAYOUT, host="another")
    with pytest.raises(SupersededError):
        await within(follow(run))


async def test_what_is_no_longer_kept_is_removed_while_the_run_goes_on(
    local_store: Store, prefect: FakePrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KEEP_UP_EVERY_S", "SWEEP_EVERY_S"):
        monkeypatch.setattr(module, name, 0.01)
    keys = [LAYOUT.model("a").eval_shard("e00001-00001", seq) for seq in range(3)]
    for key in keys:
        local_store.put(key, encode_shard(Shard(trajectories=(make_trajectory(),))))
    run = await make_run(local_store, config(retention={"max_log_bytes": 0}))
    following = asyncio.create_task(follow(run))
    async with asyncio.timeout(20):
        while local_store.list(LAYOUT.model("a").eval_writers()) != keys[-1:]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    prefect.end("rollout", Completed())
    await within(following)
    run.gateway_task.cancel()


async def test_what_killed_writers_left_of_a_run_and_its_evaluations_is_removed_while_the_run_goes_on(
    local_store: Store, prefect: FakePrefect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "KEEP_UP_EVERY_S", 0.01)
    evaluation = LAYOUT.evaluation_run("0123456789ab")
    left = [tmp_path / "store" / name / f"{HIDDEN}0" for name in (LAYOUT.run_id, evaluation)]
    local_store.put(RunLayout(evaluation).run(), b"{}")
    other = tmp_path / "store" / "other" / f"{HIDDEN}0"
    for path in (*left, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    run = await make_run(local_store, config())
    monkeypatch.setattr(run, "store", PatientStore(local_store, max_outage_s=60))
    following = asyncio.create_task(follow(run))
    async with asyncio.timeout(20):
        while any(path.exists() for path in left):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    prefect.end("rollout", Completed())
    await within(following)
    run.gateway_task.cancel()
    assert other.exists(), "another run's is that run's to remove"


async def test_a_store_that_is_away_does_not_hold_up_the_watch_over_the_children(
    run: Run, prefect: FakePrefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_UP_EVERY_S", 0)
    asked, back = threading.Event(), threading.Event()

    def snapshot() -> None:
        asked.set()
        back.wait(30)

    monkeypatch.setattr(run, "coordinator", SimpleNamespace(snapshot=snapshot))
    following = asyncio.create_task(follow(run))
    await asyncio.to_thread(asked.wait, 10)
    prefect.end("rollout", Completed())
    await within(following)
    back.set()


async def test_a_store_that_stays_away_ends_the_run_with_its_message(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_UP_EVERY_S", 0)

    def snapshot() -> None:
        raise StoreOutageError("s3://b has been unavailable for 601 s")

    monkeypatch.setattr(run, "coordinator", SimpleNamespace(snapshot=snapshot))
    with pytest.raises(StoreOutageError, match="s3://b"):
        await within(follow(run))


async def test_time_that_is_up_ends_the_following(local_store: Store, prefect: FakePrefect) -> None:
    run = await make_run(local_store, config(max_duration_s=0.05))
    await within(follow(run))
    run.gateway_task.cancel()


async def test_without_a_rollout_of_our_own_the_end_of_all_training_ends_the_run(
    local_store: Store, prefect: FakePrefect
) -> None:
    run = await make_run(local_store, config(workflow={}))
    assert await anyone_trains(run)
    assert isinstance(run.gateway, FakeGateway)
    run.gateway.models = {m: model_status(m, trainer_state="finished") for m in ("a", "b")}
    assert not await anyone_trains(run)
    run.gateway_task.cancel()


async def test_a_drain_waits_for_the_work_and_for_the_last_versions(run: Run, prefect: FakePrefect) -> None:
    draining = asyncio.create_task(drain(run))
    assert isinstance(run.gateway, FakeGateway)
    behind = model_status("b", trainer_state="drained", committed_version=4)
    run.gateway.models = {"a": model_status("a", trainer_state="finished"), "b": behind}
    prefect.end("rollout", Completed())
    await asyncio.sleep(0.05)
    assert not draining.done(), "v4 of b is committed and not yet published"
    run.gateway.models["b"] = model_status("b", trainer_state="drained")
    await within(draining)
    assert run.gateway.wanted == ["drain"]
    assert run.endings == {"a": "finished", "b": "drained"}
    desired = read_desired(run.store, LAYOUT)
    assert desired is not None
    assert desired.state == "drain"


async def test_a_drain_does_not_wait_for_a_model_that_ended(run: Run, prefect: FakePrefect) -> None:
    assert isinstance(run.gateway, FakeGateway)
    run.gateway.models = {"a": model_status("a"), "b": model_status("b", trainer_state="no_signal")}
    prefect.end("rollout", Completed())
    prefect.end("a", Failed(message="lost its weights"))
    await within(drain(run))


async def test_a_drain_that_takes_too_long_is_a_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, prefect: FakePrefect
) -> None:
    monkeypatch.setattr(module, "DRAIN_LIMIT_S", 0.05)
    draining = asyncio.create_task(drain(run))
    await asyncio.sleep(0.2)
    assert not draining.done()  # open groups have workflow.group_timeout_s
    run.config = config(workflow={"group_timeout_s": 0.05, "execution_timeout_s": 0.05})
    draining.cancel()
    await within(drain(run))
    assert "drain" in run.failures


async def test_held_out_tasks_run_once_and_a_failure_of_theirs_is_one_of_the_run(
    run: Run, prefect: FakePrefect
) -> None:
    prefect.end("evaluation", Failed(message="no such file"))
    await within(evaluate(run))
    assert run.evaluation is not None
    assert run.evaluation.parameters["mode"] == "eval"
    assert run.failures == {"evaluation": "Failed: no such file"}


async def test_without_held_out_tasks_or_with_a_failed_model_nothing_is_evaluated(
    run: Run, prefect: FakePrefect
) -> None:
    run.failures["a"] = "Failed"
    await within(evaluate(run))
    assert "evaluation" not in prefect.started


async def test_stop_waits_until_every_child_has_ended(run: Run, prefect: FakePrefect) -> None:
    stopping = asyncio.create_task(stop_children(run))
    for role in ("a", "b"):
        prefect.end(role, Completed())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    prefect.end("rollout", Completed())
    await within(stopping)
    assert run.failures == {}


async def test_who_is_lost_while_the_run_stops_is_neither_a_failure_nor_started_again(
    run: Run, prefect: FakePrefect
) -> None:
    prefect.end("a", Crashed(message="exited with -9"))
    prefect.end("b", Failed(message="no space left"))
    prefect.end("rollout", Completed())
    await within(stop_children(run))
    assert run.failures == {"b": "Failed: no space left"}
    assert prefect.started == ["a", "b", "rollout"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (asyncio.CancelledError(), "cancelled"),
        (TerminationSignal(signal.SIGTERM), "cancelled"),  # the runner's SIGTERM in the middle of a step
        (BaseExceptionGroup("in a task group", [TerminationSignal(signal.SIGTERM)]), "cancelled"),
        (SupersededError("a newer epoch"), "superseded"),
        (ProcessError("the gateway died"), "failed"),
    ],
)
async def test_how_a_run_ended_is_told_from_what_ended_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, state: str
) -> None:
    states: list[str] = []

    async def taken_over(*_: Any) -> Run:
        return run

    async def stop(_: Run) -> None:
        raise error

    async def shut_down(_: Run, state: str) -> None:
        states.append(state)

    for name, replaced in (("take_over", taken_over), ("follow", stop), ("shut_down", shut_down)):
        monkeypatch.setattr(module, name, replaced)
    with pytest.raises(type(error)):
        await module.lead(config(), "run-1")
    assert states == [state]
