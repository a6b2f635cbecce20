"""Metrics in trackers: TensorBoard for real, and what a missing or failing one does."""

from __future__ import annotations

import logging
import struct
import sys
import threading
from pathlib import Path

import pytest
from accelerate import PartialState
from tensorboardX.proto.event_pb2 import Event

from deployments.doctor import run_checks
from model_runtime import tracking as module
from model_runtime.config_file import parse_config
from model_runtime.errors import ConfigError
from model_runtime.metrics import read_metrics
from model_runtime.tracking import Tracking, check_trackers
from model_runtime.trainer import run_trainer
from model_runtime.training_config import TrackingConfig
from tests.tiny_models import make_model
from tests.training_log import TrainingFolder, make_groups


def events(folder: Path) -> list[Event]:
    """Of all event files, oldest first: records of length (8 bytes), checksum (4), event, checksum (4)."""
    found = []
    for path in sorted(folder.glob("events.*"), key=lambda p: p.stat().st_mtime_ns):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            found.append(Event.FromString(data[at + 12 : at + 12 + length]))
            at += length + 16
    return found


def shown(folder: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard shows: a start at step n hides what came before it from n on."""
    values: dict[tuple[str, int], float] = {}
    for event in events(folder):
        if event.WhichOneof("what") == "session_log" and event.session_log.status == 1:
            values = {key: v for key, v in values.items() if key[1] < event.step}
        for value in event.summary.value:
            values[value.tag, event.step] = value.simple_value
    return values


def test_every_step_of_a_run_is_in_tensorboard_once_also_after_a_restart(tmp_path):
    folder = TrainingFolder(tmp_path, make_model(tmp_path / "base"), model={"max_steps": 2, "save_every": 5})
    folder.run = {"tracking": {"trackers": ["tensorboard"], "folder": str(tmp_path / "tb")}}
    folder.write_groups(make_groups(8))
    folder.tell(desired="drain", published_version=1000)
    assert run_trainer(folder.spec, stop=threading.Event()) == 0
    folder.model["max_steps"] = 4
    folder.epoch = 2
    assert run_trainer(folder.spec, stop=threading.Event()) == 0
    (board,) = (tmp_path / "tb").iterdir()
    assert board.name == "run-planner"
    rows = read_metrics(folder.store, folder.layout, "steps")
    values = shown(board)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert values[name, row["step"]] == pytest.approx(row[name], rel=1e-6)
    assert {step for _, step in values} == {1, 2, 3, 4}


def test_steps_that_come_again_replace_those_of_an_earlier_life(tmp_path):
    config = TrackingConfig(trackers=["tensorboard"], folder=str(tmp_path))
    for start, value in ((0, 1.0), (1, 2.0)):
        tracking = Tracking(config, run_id="run", model_id="m", step=start)
        for step in range(start + 1, 4):
            tracking.log({"x": value, "name": "left out", "bad": float("nan")}, step=step)
        tracking.close()
    assert shown(tmp_path / "run-m") == {("x", 1): 1.0, ("x", 2): 2.0, ("x", 3): 2.0}


def test_a_tracker_logs_in_a_process_that_has_used_accelerate_for_nothing_else(tmp_path, caplog):
    PartialState._reset_state()
    caplog.set_level(logging.DEBUG)  # its logger refuses what it would write
    config = TrackingConfig(trackers=["tensorboard"], folder=str(tmp_path))
    tracking = Tracking(config, run_id="run", model_id="m", step=0)
    tracking.log({"x": 1.0}, step=1)
    tracking.close()
    assert shown(tmp_path / "run-m") == {("x", 1): 1.0}


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"trackers: wandb needs the package wandb: .*pip install wandb"):
        check_trackers(TrackingConfig(trackers=["wandb"]))
    check_trackers(TrackingConfig())


def test_doctor_names_it_too(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    config = parse_config(
        {
            "multi_model": {"models": [{"model_id": "m", "model_path": str(tmp_path)}]},
            "agent_model_mapping": {"a": "m"},
            "store": {"url": str(tmp_path / "store")},
            "tracking": {"trackers": ["trackio"]},
        }
    )
    (check,) = [check for check in run_checks(config) if check.name == "trackers"]
    assert not check.ok
    assert "trackio needs the package trackio" in check.detail


def test_a_tracker_that_cannot_start_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = TrackingConfig(trackers=["tensorboard"], folder=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="tensorboard can't be started"):
        Tracking(config, run_id="run", model_id="m", step=0)


def test_a_tracker_that_fails_later_is_left_out_and_stops_nothing(tmp_path, caplog):
    config = TrackingConfig(trackers=["tensorboard"], folder=str(tmp_path))
    tracking = Tracking(config, run_id="run", model_id="m", step=0)

    class Full:
        def log(self, values, step):
            raise OSError("no space left on device")

    tracking._trackers["tensorboard"].finish()
    tracking._trackers["tensorboard"] = Full()
    tracking.log({"x": 1.0}, step=1)
    tracking.log({"x": 1.0}, step=2)
    tracking.close()
    assert caplog.text.count("no space left on device") == 1


def test_no_tracker_means_no_tracker_library():
    assert "wandb" not in sys.modules
    assert "mlflow" not in sys.modules
