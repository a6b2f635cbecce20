"""Group admission: the rules as a state machine, then the waiting."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.admission import AdmissionState, GroupAdmission
from model_runtime.config import RunConfig
from model_runtime.config_file import parse_config
from model_runtime.errors import AlreadyDoneError, ConflictError
from model_runtime.protocol import GroupRequest, ModelRenewal, QueueReport

WRITER = "e00001-00001"


def config(
    *, max_surplus_ratio: float = 1.0, models: int = 2, batch_size: int = 2, trigger: int = 2
) -> RunConfig:
    """Limits of batch_size × trigger groups each (threshold 0)."""
    names = ["fast", "slow", "third"][:models]
    return parse_config(
        {
            "multi_model": {
                "models": [
                    {
                        "model_id": name,
                        "model_path": "/models/tiny",
                        "batch_size": batch_size,
                        "async_training": {
                            "trigger_parameter_sync_step": trigger,
                            "staleness_threshold": 0,
                        },
                    }
                    for name in names
                ]
            },
            "agent_model_mapping": {f"{name}_agent": name for name in names},
            "gateway": {"max_surplus_ratio": max_surplus_ratio},
        }
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def renewal(model_id: str, **fields: Any) -> ModelRenewal:
    values: dict[str, Any] = {
        "model_id": model_id,
        "epoch": 1,
        "incarnation": 1,
        "seq": 1,
        "kind": "trainable",
        "status": "ready",
        "trainer_state": "running",
    }
    return ModelRenewal(**values | fields)


def state(run: RunConfig | None = None, *, clock: Clock | None = None) -> AdmissionState:
    """Every model renewed once, with nothing read."""
    run = run or config()
    machine = AdmissionState(run, writer=WRITER, clock=clock or Clock())
    for model in run.models:
        machine.observe(renewal(model.model_id))
    return machine


def ask(machine: AdmissionState, *names: str, size: int = 2) -> list[str]:
    """Groups opened for drivers that wait for these."""
    for name in names:
        machine.join(GroupRequest(group_id=name, group_size=size))
    return [group.group_id for group in machine.admit(lambda _: True)]


def settle(machine: AdmissionState, name: str, *, seq: int = 0, size: int = 2) -> None:
    for index in range(size):
        machine.member_settled(name, index, status="finalized", seq=seq)


def queue(untrained: int = 0, trained: int = 0, share: float = 1.0, read: int = 0) -> QueueReport:
    return QueueReport(
        untrained_groups=untrained,
        trained_since_publish=trained,
        feed_share=share,
        read_positions={WRITER: read},
    )


# ------------------------------------------------------------------ budget


def test_groups_open_up_to_the_limit_oldest_first():
    machine = state(config(max_surplus_ratio=0))
    assert ask(machine, "a", "b", "c", "d", "e", "f") == ["a", "b", "c", "d"]
    assert machine.waiting == 2


def test_a_group_counts_until_it_is_trained_and_published():
    machine = state(config(models=1))
    ask(machine, "a", "b", "c", "d")
    settle(machine, "a", seq=3)
    assert ask(machine, "e") == []  # settled, not read yet
    machine.observe(renewal("fast", queue=queue(read=3)))
    assert machine.used("fast") == 4  # its shard is the next to be read
    machine.observe(renewal("fast", queue=queue(untrained=1, read=4)))
    assert machine.used("fast") == 4
    machine.observe(renewal("fast", queue=queue(trained=1, read=4)))
    assert machine.used("fast") == 4
    machine.observe(renewal("fast", queue=queue(read=4)))
    assert machine.used("fast") == 3
    assert ask(machine) == ["e"]


def test_a_settled_group_that_taught_nothing_leaves_at_once():
    machine = state(config(models=1))
    ask(machine, "a", "b", "c", "d", "e")
    settle(machine, "a", seq=0)
    machine.observe(renewal("fast", queue=queue(untrained=0, read=1)))
    assert ask(machine) == ["e"]


def test_open_groups_count_by_the_share_that_feeds_the_model():
    machine = state(config(models=1))
    machine.observe(renewal("fast", queue=queue(share=0.5)))
    assert len(ask(machine, *"abcdefghij")) == 8
    assert machine.used("fast") == 4.0


def test_a_loading_trainer_does_not_empty_its_books():
    machine = state(config(models=1))
    machine.observe(renewal("fast", queue=queue(untrained=4)))
    machine.observe(renewal("fast", trainer_state="loading", incarnation=2, queue=QueueReport()))
    assert machine.used("fast") == 4
    assert ask(machine, "a") == []


def test_a_shard_read_before_its_settlement_is_reported_is_not_waited_for():
    machine = state(config(models=1))
    ask(machine, "a")
    machine.observe(renewal("fast", queue=queue(untrained=1, read=1)))
    settle(machine, "a", seq=0)
    assert machine.used("fast") == 1


# ------------------------------------------------------------------ who gates


def test_nothing_opens_before_every_trainable_model_was_ready_once():
    machine = AdmissionState(config(), writer=WRITER, clock=Clock())
    assert ask(machine, "a") == []
    machine.observe(renewal("fast"))
    assert ask(machine) == []
    machine.observe(renewal("slow", status="starting", trainer_state=None))
    assert ask(machine) == []
    machine.observe(renewal("slow"))
    assert ask(machine) == ["a"]


@pytest.mark.parametrize(
    "gone",
    [
        {"status": "failed"},
        {"status": "stopped"},
        {"trainer_state": "failed"},
        {"trainer_state": "finished"},
        {"trainer_state": "no_signal"},
        {"trainer_state": "drained"},
        {"steps_left": 0},
    ],
)
def test_a_model_that_takes_no_data_closes_nobody_elses_supply(gone):
    machine = state(config(max_surplus_ratio=0))
    machine.observe(renewal("slow", queue=queue(untrained=4)))
    assert ask(machine, "a") == []
    machine.observe(renewal("slow", queue=queue(untrained=4), **gone))
    assert ask(machine) == ["a"]
    assert machine.open_groups["a"].train == {"fast": True, "slow": False}


def test_a_model_that_failed_before_it_was_heard_of_closes_nobody_elses_supply():
    machine = AdmissionState(config(), writer=WRITER, clock=Clock())
    machine.observe(renewal("fast"))
    assert ask(machine, "a") == []
    machine.models_failed(["slow", "a frozen one"])
    assert ask(machine) == ["a"]
    assert machine.open_groups["a"].train == {"fast": True, "slow": False}
    machine.observe(renewal("fast", steps_left=0))
    assert machine.has_ended


def test_a_model_without_a_lease_gates_again_when_it_is_back():
    machine = state(config(max_surplus_ratio=0))
    machine.observe(renewal("slow", queue=queue(untrained=4)))
    machine.lease_lost("slow")
    assert ask(machine, "a") == ["a"]
    machine.observe(renewal("slow", queue=queue(untrained=4)))
    assert ask(machine, "b") == []


def test_a_model_that_lost_its_lease_is_fed_within_its_limit_only():
    machine = state()
    machine.lease_lost("slow")
    opened = ask(machine, *"abcd")
    assert [machine.open_groups[g].train["slow"] for g in opened] == [True] * 4
    machine.observe(renewal("fast", queue=queue(share=0.5)))
    assert [machine.open_groups[g].train["slow"] for g in ask(machine, "e", "f")] == [False] * 2


def test_the_run_ends_when_every_trainable_model_is_past_its_steps():
    machine = state()
    machine.observe(renewal("fast", steps_left=0))
    assert not machine.has_ended
    machine.observe(renewal("slow", trainer_state="finished"))
    assert machine.has_ended
    assert ask(machine, "a") == []
    assert machine.answer(GroupRequest(group_id="a", group_size=2)).status == "ended"


def test_failures_alone_do_not_end_the_run():
    machine = state()
    for model_id in ("fast", "slow"):
        machine.observe(renewal(model_id, status="failed"))
    assert not machine.has_ended
    assert ask(machine, "a") == []


# ------------------------------------------------------------------ surplus


def test_a_full_model_lets_a_bounded_number_of_groups_pass_without_it():
    machine = state()
    ask(machine, *"abcd")
    machine.observe(renewal("slow", queue=queue(untrained=4)))
    for name in "abcd":
        settle(machine, name)
    machine.observe(renewal("slow", queue=queue(untrained=4, read=1)))
    for _ in range(20):
        machine.observe(renewal("fast", queue=queue(read=1)))
        for name in list(machine.open_groups):
            settle(machine, name)
        ask(machine, *(f"s{i}" for i in range(40)))
    opened = machine._gates["slow"]
    # ratio 1 × 4 opened for it + 2 that a batch requires
    assert opened.num_surplus == 6


def test_train_is_fixed_at_opening():
    machine = state()
    machine.observe(renewal("slow", queue=queue(untrained=4)))
    ask(machine, "a")
    machine.observe(renewal("slow", queue=queue()))
    assert machine.answer(GroupRequest(group_id="a", group_size=2)).train == {"fast": True, "slow": False}


def _simulate(max_surplus_ratio: float, *, ticks: int = 3000) -> dict[str, int]:
    """Training steps of two models, one ten times slower, that every group feeds both."""
    run = config(max_surplus_ratio=max_surplus_ratio, batch_size=4, trigger=2)
    machine = state(run)
    seconds = {"fast": 1, "slow": 10}
    steps = dict.fromkeys(seconds, 0)
    trained = dict.fromkeys(seconds, 0)
    ready: dict[str, int] = dict.fromkeys(seconds, 0)
    busy_until = dict.fromkeys(seconds, 0)
    seq, asked, born = 0, 0, {}
    for now in range(ticks):
        for group in [g for g in machine.open_groups.values() if now - born[g.group_id] >= 2]:
            settle(machine, group.group_id, seq=seq)
            for model_id, train in group.train.items():
                ready[model_id] += train
            seq += 1
        for model_id, step_s in seconds.items():
            if now >= busy_until[model_id] and ready[model_id] >= 4:
                ready[model_id] -= 4
                steps[model_id] += 1
                trained[model_id] = 0 if steps[model_id] % 2 == 0 else trained[model_id] + 4
                busy_until[model_id] = now + step_s
            report = queue(untrained=ready[model_id], trained=trained[model_id], read=seq)
            machine.observe(renewal(model_id, queue=report))
        while machine.waiting < 4:
            machine.join(GroupRequest(group_id=f"g{asked}", group_size=2))
            asked += 1
        born |= {group.group_id: now for group in machine.admit(lambda _: True)}
    return steps


def test_no_deadlock_and_no_starving_when_one_model_is_ten_times_slower():
    waiting, surplus = _simulate(0.0), _simulate(1.0)
    assert waiting["slow"] == pytest.approx(300, rel=0.05)  # the slow one never idles
    assert surplus["slow"] == pytest.approx(300, rel=0.05)
    assert waiting["fast"] == pytest.approx(waiting["slow"], rel=0.05)
    assert surplus["fast"] == pytest.approx(2 * waiting["fast"], rel=0.05)


# ------------------------------------------------------------------ deadlines and the line


def test_expired_groups_name_the_members_left():
    clock = Clock()
    machine = state(clock=clock)
    machine.join(GroupRequest(group_id="a", group_size=3, deadline_s=10))
    machine.admit(lambda _: True)
    machine.member_settled("a", 1, status="finalized", seq=0)
    machine.member_settled("a", 2, status="retried", seq=0)
    assert machine.expired_groups() == []
    clock.now += 10
    assert [(g.group_id, g.unsettled) for g in machine.expired_groups()] == [("a", [0, 2])]


def test_members_settled_in_an_earlier_life_are_not_waited_for():
    machine = state()
    machine.join(GroupRequest(group_id="a", group_size=3, settled_members=[0, 2]))
    machine.admit(lambda _: True)
    machine.member_settled("a", 1, status="finalized", seq=0)
    assert machine.open_groups == {}


def test_an_absent_driver_does_not_hold_the_line_up_and_keeps_its_place():
    clock = Clock()
    machine = state(config(models=1), clock=clock)
    assert ask(machine, *"abcd") == ["a", "b", "c", "d"]
    for name in ("gone", "here"):
        machine.join(GroupRequest(group_id=name, group_size=2))
    settle(machine, "a")
    machine.observe(renewal("fast", queue=queue(read=1)))
    assert [g.group_id for g in machine.admit(lambda name: name == "here")] == ["here"]
    machine.join(GroupRequest(group_id="later", group_size=2))
    settle(machine, "b", seq=1)
    machine.observe(renewal("fast", queue=queue(read=2)))
    assert [g.group_id for g in machine.admit(lambda _: True)] == ["gone"]
    clock.now += 1000
    machine.admit(lambda _: False)
    assert machine.waiting == 0


# ------------------------------------------------------------------ waiting


def admission(run: RunConfig | None = None) -> GroupAdmission:
    run = run or config(models=1)
    gate = GroupAdmission(run, writer=WRITER)
    for model in run.models:
        gate.observe(renewal(model.model_id))
    return gate


def group(name: str, wait_s: float = 5.0) -> GroupRequest:
    return GroupRequest(group_id=name, group_size=2, wait_s=wait_s)


async def test_open_answers_at_once_while_there_is_room():
    gate = admission()
    answer = await gate.open(group("a"))
    assert (answer.status, answer.train) == ("open", {"fast": True})
    assert gate.require_open("a").group_size == 2


async def test_open_waits_for_room_and_opens_in_order():
    gate = admission()
    for name in "abcd":
        await gate.open(group(name))
    order: list[str] = []

    async def wait(name: str) -> None:
        assert (await gate.open(group(name))).status == "open"
        order.append(name)

    tasks = [asyncio.create_task(wait(name)) for name in ("e", "f")]
    await asyncio.sleep(0)
    assert gate.num_waiting == 2
    for seq, name in enumerate("ab"):
        for index in range(2):
            gate.member_settled(name, index, status="finalized", seq=seq)
        gate.observe(renewal("fast", queue=queue(read=seq + 1)))
    await asyncio.gather(*tasks)
    assert order == ["e", "f"]


async def test_open_answers_waiting_when_time_is_up_and_the_place_is_kept():
    gate = admission()
    for name in "abcd":
        await gate.open(group(name))
    assert (await gate.open(group("first", wait_s=0.01))).status == "waiting"
    second = asyncio.create_task(gate.open(group("second", wait_s=0.05)))
    first = asyncio.create_task(gate.open(group("first")))
    await asyncio.sleep(0)
    for index in range(2):
        gate.member_settled("a", index, status="finalized", seq=0)
    gate.observe(renewal("fast", queue=queue(read=1)))
    assert (await first).status == "open"
    assert (await second).status == "waiting"


async def test_asking_again_for_an_open_group_changes_nothing():
    gate = admission()
    assert await gate.open(group("a")) == await gate.open(group("a"))
    assert gate.used("fast") == 1


async def test_a_cancelled_wait_leaves_nothing_behind():
    gate = admission()
    for name in "abcd":
        await gate.open(group(name))
    task = asyncio.create_task(gate.open(group("e")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gate._waiters == {}


async def test_end_wakes_everybody_that_waits():
    gate = admission()
    for name in "abcd":
        await gate.open(group(name))
    task = asyncio.create_task(gate.open(group("e")))
    await asyncio.sleep(0)
    gate.end()
    assert (await task).status == "ended"
    assert (await gate.open(group("f"))).status == "ended"
    assert gate.require_open("a").group_id == "a"  # open groups go on


async def test_a_group_that_is_over_is_refused():
    gate = admission()
    await gate.open(group("a"))
    for index in range(2):
        gate.member_settled("a", index, status="finalized", seq=0)
    with pytest.raises(AlreadyDoneError, match="'a' is settled"):
        await gate.open(group("a"))
    with pytest.raises(AlreadyDoneError, match="'a' is settled"):
        gate.require_open("a")
    with pytest.raises(ConflictError, match="'b' is not open"):
        gate.require_open("b")


async def test_frozen_models_alone_never_wait():
    run = config(models=1)
    frozen = run.models[0].model_copy(update={"kind": "frozen"})
    run = run.model_copy(update={"multi_model": run.multi_model.model_copy(update={"models": [frozen]})})
    answer = await GroupAdmission(run, writer=WRITER).open(group("a"))
    assert (answer.status, answer.train) == ("open", {})
