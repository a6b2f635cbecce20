"""Which versions an evaluation is of, what its figures are, and that one plan is worked on once."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from model_runtime.adapters import write_version
from model_runtime.config import RunConfig
from model_runtime.coordinator import begin_run
from model_runtime.errors import ConfigError
from model_runtime.evaluation import (
    EvaluationDocument,
    EvaluationPlan,
    ModelVersion,
    comparable,
    difference,
    due_checkpoints,
    estimate,
    frozen_config,
    make_plan,
    newest_run,
    pass_at_k,
    pass_rates,
    read_evaluation,
    read_evaluations,
    write_evaluation,
)
from model_runtime.layout import RunLayout
from model_runtime.store import Store
from tests.training_log import save_manifest
from tests.unit.model_runtime.test_adapters import adapter

LAYOUT = RunLayout("run-1")


def config(folder: Path, **changes: Any) -> RunConfig:
    tasks = folder / "held_out.jsonl"
    tasks.write_text('{"n": 1}\n{"n": 2}\n')
    models = [
        {"model_id": "a", "model_path": "/a", "save_every": 1},
        {"model_id": "b", "model_path": "/b"},
        {"model_id": "judge", "model_path": "/j", "kind": "frozen", "adapter_path": "/judge-adapter"},
    ]
    raw: dict[str, Any] = {
        "name": "shop",
        "multi_model": {"models": models},
        "agent_model_mapping": {"x": "a", "y": "b", "z": "judge"},
        "workflow": {"function": "m:f", "tasks": "/t", "held_out_tasks": str(tasks)},
    }
    return RunConfig.model_validate(raw | changes)


def commit(store: Store, model_id: str, *versions: int) -> None:
    for version in versions:
        files = adapter(seed=version)
        write_version(store, LAYOUT.model(model_id), files, version=version, step=version, epoch=1)


def document(plan: EvaluationPlan, created_at: float = 1.0, **changes: Any) -> EvaluationDocument:
    given = {"plan": plan, "executions": {"finalized": 2}, "reward": None, "created_at": created_at}
    return EvaluationDocument.model_validate(given | {"duration_s": 1.0} | changes)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize(("num_samples", "num_solved"), [(4, 0), (4, 1), (4, 3), (4, 4), (6, 2)])
def test_pass_at_k_is_the_share_of_draws_of_k_samples_that_hold_a_solution(
    num_samples: int, num_solved: int
) -> None:
    samples = [i < num_solved for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        draws = [any(draw) for draw in itertools.combinations(samples, k)]
        assert pass_at_k(num_samples, num_solved, k) == pytest.approx(statistics.fmean(draws))


def test_pass_rates_count_samples_without_a_reward_as_not_solved() -> None:
    rates = pass_rates({"t0": [1.0, 0.0], "t1": [1.0]}, samples_per_task=2, success_reward=1.0)
    assert rates == {1: pytest.approx(0.5), 2: pytest.approx(1.0)}
    assert list(pass_rates({"t": [0.0] * 6}, samples_per_task=6, success_reward=1.0)) == [1, 2, 4, 6]


def test_pass_rates_are_means_over_all_tasks_those_without_any_reward_too() -> None:
    rewards = {"t0": [1.0, 1.0], "t1": [], "t2": [], "t3": []}
    rates = pass_rates(rewards, samples_per_task=2, success_reward=1.0)
    assert rates == {1: pytest.approx(0.25), 2: pytest.approx(0.25)}
    assert pass_rates({"t": []}, samples_per_task=1, success_reward=1.0) == {1: 0.0}
    assert pass_rates({}, samples_per_task=1, success_reward=1.0) == {}


def test_samples_the_infrastructure_lost_were_not_drawn_for_pass_rates() -> None:
    rewards = {"t0": [1.0, 0.0, 0.0], "t1": [1.0, 0.0, 0.0, 0.0], "t2": []}
    rates = pass_rates(
        rewards, samples_per_task=4, success_reward=1.0, unknown={"t0": 1, "t2": 4, "elsewhere": 1}
    )
    assert rates[1] == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert rates[2] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert rates[4] == 1.0, "t1 alone was drawn four times"
    lost = pass_rates({"t": [1.0]}, samples_per_task=2, success_reward=1.0, unknown={"t": 1})
    assert lost == {1: 1.0}


def test_the_interval_is_over_tasks_not_over_their_samples() -> None:
    once = estimate({"t0": [0.0], "t1": [1.0], "t2": [1.0], "t3": [0.0]})
    often = estimate({"t0": [0.0] * 9, "t1": [1.0] * 9, "t2": [1.0] * 9, "t3": [0.0] * 9})
    assert once == often
    assert once is not None
    assert (once.mean, once.num_tasks) == (0.5, 4)
    assert once.high - once.mean == pytest.approx(1.959964 * statistics.stdev([0, 1, 1, 0]) / 2)


def test_tasks_without_a_reward_are_missing_and_not_zero() -> None:
    assert estimate({"t0": [], "t1": [0.5]}) == estimate({"t1": [0.5]})
    assert estimate({"t0": []}) is None


# ---------------------------------------------------------------- what is evaluated


def test_a_model_that_is_not_named_is_taken_at_its_latest(local_store: Store, tmp_path: Path) -> None:
    commit(local_store, "a", 0, 1, 2)
    commit(local_store, "b", 0, 1)
    wanted = [ModelVersion(model_id="a", version=1)]
    plan = make_plan(local_store, config(tmp_path), run_id="run-1", wanted=wanted)
    assert plan.versions == {"a": 1, "b": 1, "judge": None}
    assert plan.named_versions() == "a v1, b v1, judge base"


def test_the_plan_s_id_depends_on_all_that_the_outcome_depends_on(local_store: Store, tmp_path: Path) -> None:
    commit(local_store, "a", 0, 1)
    commit(local_store, "b", 0)

    def plan_id(settings: RunConfig, **versions: Any) -> str:
        wanted = [ModelVersion(model_id=m, version=v) for m, v in versions.items()]
        return make_plan(local_store, settings, run_id="run-1", wanted=wanted).evaluation_id

    settings = config(tmp_path)
    ids = [
        plan_id(settings),
        plan_id(settings, a=0),
        plan_id(settings, a="base"),
        plan_id(config(tmp_path, seed=1)),
        plan_id(config(tmp_path, evaluation={"samples_per_task": 4, "temperature": 0.7})),
    ]
    assert plan_id(settings, a=1) == ids[0], "the latest is version 1"
    (tmp_path / "held_out.jsonl").write_text('{"n": 3}\n')
    ids.append(plan_id(settings))
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("model_id", "version", "message"),
    [
        ("c", "latest", "unknown model 'c'"),
        ("a", 7, "model 'a': version 7 is not committed; the newest is 0"),
        ("b", "latest", "model 'b': no version is committed yet"),
    ],
)
def test_what_cannot_be_evaluated_is_named(
    local_store: Store, tmp_path: Path, model_id: str, version: Any, message: str
) -> None:
    commit(local_store, "a", 0)
    wanted = [ModelVersion(model_id=model_id, version=version)]
    with pytest.raises(ConfigError, match=message):
        make_plan(local_store, config(tmp_path), run_id="run-1", wanted=wanted)


def test_without_held_out_tasks_there_is_nothing_to_evaluate(local_store: Store, tmp_path: Path) -> None:
    settings = config(tmp_path, workflow={"function": "m:f", "tasks": "/t"})
    with pytest.raises(ConfigError, match=r"workflow\.held_out_tasks"):
        make_plan(local_store, settings, run_id="run-1", wanted=[])


def test_the_frozen_config_serves_each_version_s_own_adapter(local_store: Store, tmp_path: Path) -> None:
    commit(local_store, "a", 0, 1)
    commit(local_store, "b", 0)
    settings = config(tmp_path)
    wanted = [ModelVersion(model_id="b", version="base")]
    plan = make_plan(local_store, settings, run_id="run-1", wanted=wanted)
    frozen = frozen_config(local_store, settings, plan, tmp_path / "adapters")
    assert [m.kind for m in frozen.models] == ["frozen"] * 3
    assert frozen.model("a").adapter_path == str(tmp_path / "adapters/a/v1")
    assert (tmp_path / "adapters/a/v1/adapter_model.safetensors").read_bytes() == adapter(seed=1).weights
    assert frozen.model("b").adapter_path is None
    assert frozen.model("judge").adapter_path == "/judge-adapter"
    assert RunConfig.model_validate(frozen.model_dump(mode="json")) == frozen


def test_an_evaluation_that_broke_off_is_begun_again_where_adapters_and_models_lie_elsewhere(
    local_store: Store, tmp_path: Path
) -> None:
    commit(local_store, "a", 0, 1)
    commit(local_store, "b", 0)
    settings = config(tmp_path)
    plan = make_plan(local_store, settings, run_id="run-1", wanted=[])
    work = RunLayout(LAYOUT.evaluation_run(plan.evaluation_id))
    begin_run(local_store, work, frozen_config(local_store, settings, plan, tmp_path / "one home"), epoch=1)
    models = [m.model_copy(update={"model_path": f"/mnt{m.model_path}"}) for m in settings.models]
    elsewhere = settings.multi_model.model_copy(update={"models": models})
    moved = settings.model_copy(update={"multi_model": elsewhere})
    again = frozen_config(local_store, moved, plan, tmp_path / "another home")
    assert again.model("a").adapter_path == str(tmp_path / "another home/a/v1")
    assert begin_run(local_store, work, again, epoch=2).epoch == 2


def test_the_newest_run_is_that_of_the_config_and_no_evaluation(local_store: Store, tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(ConfigError, match="no run of the config 'shop'"):
        newest_run(local_store, "shop")
    begin_run(local_store, LAYOUT, settings, epoch=1)
    begin_run(local_store, RunLayout("run-2"), settings, epoch=1)
    begin_run(local_store, RunLayout("other"), config(tmp_path, name="other"), epoch=1)
    begin_run(local_store, RunLayout(LAYOUT.evaluation_run("0123456789ab")), settings, epoch=1)
    assert newest_run(local_store, "shop") == "run-2"


def test_greedy_samples_would_all_be_the_same(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="samples_per_task is 4 with temperature 0"):
        config(tmp_path, evaluation={"samples_per_task": 4})


# ---------------------------------------------------------------- in the store


def test_of_two_that_worked_on_one_plan_the_first_stands(local_store: Store, tmp_path: Path) -> None:
    commit(local_store, "a", 0)
    commit(local_store, "b", 0)
    plan = make_plan(local_store, config(tmp_path), run_id="run-1", wanted=[])
    assert read_evaluation(local_store, LAYOUT, plan.evaluation_id) is None
    first, second = document(plan, created_at=1.0), document(plan, created_at=2.0)
    assert write_evaluation(local_store, LAYOUT, first) == first
    assert write_evaluation(local_store, LAYOUT, second) == first
    assert read_evaluations(local_store, LAYOUT) == [first]


def test_an_evaluation_is_compared_with_base_and_with_the_last_one_of_the_same_work(
    local_store: Store, tmp_path: Path
) -> None:
    commit(local_store, "a", 0, 1)
    commit(local_store, "b", 0)
    settings = config(tmp_path)

    def plan(given: RunConfig = settings, **versions: Any) -> EvaluationPlan:
        wanted = [ModelVersion(model_id=m, version=v) for m, v in versions.items()]
        return make_plan(local_store, given, run_id="run-1", wanted=wanted)

    base = document(plan(a="base", b="base"), 1.0)
    older, last = document(plan(a=0), 2.0), document(plan(a=0, b="base"), 3.0)
    other_work = document(plan(config(tmp_path, seed=9)), 4.0)
    now = document(plan(), 5.0)
    everything = [base, older, last, other_work, now]
    assert comparable(everything, now.plan) == (base, last)
    assert comparable([now], now.plan) == (None, None)


# ------------------------------------------------------------------ checkpoints


def done(run: RunConfig, store: Store, *choices: ModelVersion) -> None:
    plan = make_plan(store, run, run_id="run-1", wanted=choices)
    document = EvaluationDocument(
        plan=plan, executions={"finalized": 2}, reward=None, created_at=1.0, duration_s=1.0
    )
    write_evaluation(store, LAYOUT, document)


@pytest.fixture
def saved(local_store: Store, tmp_path: Path) -> tuple[Store, RunConfig]:
    """Twenty checkpoints of `a`, of a version each; `b` has none."""
    commit(local_store, "a", *range(21))
    commit(local_store, "b", 0)
    for step in range(1, 21):
        save_manifest(local_store, LAYOUT.model("a"), step, version=step)
    return local_store, config(tmp_path, evaluation={"every_checkpoints": 3})


def test_every_nth_checkpoint_is_due_however_many_were_saved_at_once(saved: tuple[Store, RunConfig]) -> None:
    store, run = saved
    due = due_checkpoints(store, run, run_id="run-1")
    assert [(d.model_id, d.version) for d in due] == [("a", v) for v in (18, 15, 12, 9, 6, 3)]


def test_an_evaluated_version_is_not_due_whatever_its_partners_have_become(
    saved: tuple[Store, RunConfig],
) -> None:
    store, run = saved
    for version in (18, 15, 12, 9, 6):
        done(run, store, ModelVersion(model_id="a", version=version))
        commit(store, "b", version)  # `b` goes on meanwhile
    assert [d.version for d in due_checkpoints(store, run, run_id="run-1")] == [3]
    done(run, store, ModelVersion(model_id="a", version=3))
    assert due_checkpoints(store, run, run_id="run-1") == []


def test_another_task_set_makes_them_due_again(saved: tuple[Store, RunConfig], tmp_path: Path) -> None:
    store, run = saved
    done(run, store, ModelVersion(model_id="a", version=18))
    assert run.workflow.held_out_tasks is not None
    Path(run.workflow.held_out_tasks).write_text('{"n": 3}\n')
    assert len(due_checkpoints(store, run, run_id="run-1")) == 6


def test_a_checkpoint_without_its_marker_is_not_there_yet(saved: tuple[Store, RunConfig]) -> None:
    store, run = saved
    store.put(f"{LAYOUT.model('a').checkpoint(21)}/state.bin", b"half")
    assert due_checkpoints(store, run, run_id="run-1")[0].version == 18


def test_a_checkpoint_with_a_damaged_manifest_keeps_no_other_from_being_due(
    saved: tuple[Store, RunConfig],
) -> None:
    store, run = saved
    store.put(LAYOUT.model("a").checkpoint_marker(15), b"{")
    assert [d.version for d in due_checkpoints(store, run, run_id="run-1")] == [18, 12, 9, 6, 3]


def test_what_retention_took_away_changes_nothing_of_what_is_due(saved: tuple[Store, RunConfig]) -> None:
    store, run = saved
    for step in (1, 2, 4, 5, 7):
        store.delete(LAYOUT.model("a").checkpoint_marker(step))
    assert [d.version for d in due_checkpoints(store, run, run_id="run-1")] == [18, 15, 12, 9, 6, 3]


def test_two_ways_of_saying_when_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cron and interval_s are both set"):
        config(tmp_path, evaluation={"cron": "* * * * *", "interval_s": 60})


def test_a_gain_is_measured_task_by_task_over_those_both_have() -> None:
    now = {"easy": [1.0], "hard": [0.5], "new": [1.0]}
    gain = difference(now, {"easy": [0.8], "hard": [0.1, 0.3], "gone": [0.0]})
    assert gain is not None
    assert (gain.mean, gain.num_tasks) == (pytest.approx(0.25), 2)
    assert gain.low < 0.25 < gain.high
    alike = difference({"easy": [1.0], "hard": [0.4]}, {"easy": [0.8], "hard": [0.2]})
    assert alike is not None
    assert alike.high - alike.low == pytest.approx(0), "tasks differ, the gain does not"
    assert difference(now, {}) is None
