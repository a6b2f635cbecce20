"""Two models of one run train by their own settings, and never by each other's."""

import threading
from typing import Any

import pytest

from model_runtime.layout import RunLayout, writer_id
from model_runtime.metrics import read_metrics
from model_runtime.protocol import TrainerSpec
from model_runtime.trainer import run_trainer
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Settlement, Shard
from tests.tiny_models import make_model
from tests.training_log import AGENT_ID, TrainingFolder, make_groups

NUM_GROUPS = 6
PLANNER = {
    "batch_size": 3,
    "objective": {"advantage": "rloo", "loss": "gspo", "aggregation": "seq-mean-token-mean", "kl_coef": 0.1},
    "trainer": {"learning_rate": 1e-3, "warmup_steps": 2},
    "async_training": {"trigger_parameter_sync_step": 1, "max_staleness": 1000},
}
SOLVER = {
    "batch_size": 2,
    "objective": {"advantage": "grpo", "negative_advantage_scale": 0.5, "clip_ratio_high": 0.28},
    "trainer": {"learning_rate": 4e-3},
    "async_training": {"trigger_parameter_sync_step": 3, "max_staleness": 1000},
    "max_steps": 3,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("base") / "model"))


def steps_of(root: Any, sections: dict[str, dict[str, Any]], model_id: str) -> tuple[list[dict], list[str]]:
    """(metric rows, versions) of one of the run's models, trained on the same log as the other."""
    folder = TrainingFolder(root, root)
    folder.run = {
        "multi_model": {"models": [{"model_id": name} | section for name, section in sections.items()]},
        "agent_model_mapping": {f"{name}_agent": name for name in sections},
    }
    layout = RunLayout("run").model(model_id)
    rows = [row for group in make_groups(NUM_GROUPS) for row in group]
    settlements = [
        Settlement(member=row.member, status="finalized", num_rows={AGENT_ID: 1}, train=True) for row in rows
    ]
    shard = encode_shard(Shard(tuple(rows), tuple(settlements)))
    folder.store.put_if_absent(layout.log_shard(writer_id(1, 1), 0), shard)
    folder.tell(desired="drain", published_version=1000)
    spec = TrainerSpec.model_validate(folder.spec.model_dump() | {"model_id": model_id})
    assert run_trainer(spec, stop=threading.Event()) == 0
    return read_metrics(folder.store, layout, "steps"), folder.store.children(layout.versions())


def test_each_model_trains_by_its_own_settings_and_as_if_it_were_alone(tmp_path: Any, base: str) -> None:
    sections = {
        name: {"model_path": base, "lora": {"rank": 8}} | own
        for name, own in (("planner", PLANNER), ("solver", SOLVER))
    }
    found = {name: steps_of(tmp_path / name, sections, name) for name in sections}
    (planner, planner_versions), (solver, solver_versions) = found["planner"], found["solver"]
    assert [row["actor/lr"] for row in planner] == pytest.approx([5e-4, 1e-3])
    assert [row["actor/lr"] for row in solver] == pytest.approx([4e-3] * 3)
    assert {row["batch/num_groups"] for row in planner} == {3}
    assert {row["batch/num_groups"] for row in solver} == {2}
    assert (planner_versions, solver_versions) == (["v0", "v1", "v2"], ["v0", "v1"])
    assert all("actor/kl_loss" in row for row in planner)
    assert not any("actor/kl_loss" in row for row in solver)
    assert planner[0]["critic/advantages/min"] == -planner[0]["critic/advantages/max"]
    assert solver[0]["critic/advantages/min"] == pytest.approx(-solver[0]["critic/advantages/max"] / 2)
    for name, (rows, _) in found.items():
        alone, _ = steps_of(tmp_path / f"{name} alone", {name: sections[name]}, name)
        assert [row["actor/grad_norm"] for row in alone] == [row["actor/grad_norm"] for row in rows]
