"""A model's metrics in the trackers people watch, through accelerate: one run for each model, continued when
the trainer is started again. The store has every row in any case; a tracker that fails is left out from
then on and never stops the training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model_runtime.errors import ConfigError
from model_runtime.training_config import TrackingConfig

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
"""Tracker → the packages of which one must be there."""

_MLFLOW_TAG = "repertory.run"

logger = logging.getLogger(__name__)


def check_trackers(config: TrackingConfig) -> None:
    """Raises ConfigError naming the tracker whose package is missing, and how to get it."""
    for name in config.trackers:
        if not any(find_spec(package) for package in PACKAGES[name]):
            raise ConfigError(
                f"tracking.trackers: {name} needs the package {PACKAGES[name][0]}: "
                f"`.venv/bin/python -m pip install {PACKAGES[name][0]}`, or leave {name} out"
            )


class Tracking:
    """The trackers of one model in one life of its trainer. `step`: the last one that is not repeated.

    Raises ConfigError for a package that is missing or a tracker that can't be started.
    """

    def __init__(self, config: TrackingConfig, *, run_id: str, model_id: str, step: int) -> None:
        check_trackers(config)
        self._trackers: dict[str, Any] = {}
        if config.trackers:
            from accelerate import PartialState

            PartialState(cpu=True)  # accelerate's trackers refuse to log without it
        for name in config.trackers:
            try:
                tracker = _MAKE[name](config, f"{run_id}-{model_id}", step)
                tracker.start()
            except Exception as error:  # whatever the library raises: no network, no key, a full disk
                raise ConfigError(f"tracking.trackers: {name} can't be started: {error}") from error
            self._trackers[name] = tracker

    def log(self, row: Mapping[str, Any], *, step: int) -> None:
        values = {k: v for k, v in row.items() if isinstance(v, float | int) and math.isfinite(v)}
        self._each("log", lambda tracker: tracker.log(values, step=step))

    def close(self) -> None:
        self._each("finish", lambda tracker: tracker.finish())
        self._trackers = {}

    def _each(self, what: str, call: Callable[[Any], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # the library's business; the rows are in the store
                logger.error("tracker %s: %s failed, it is left out from here on: %s", name, what, error)
                del self._trackers[name]


def _tensorboard(config: TrackingConfig, run_name: str, step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Steps that an earlier life logged after its last checkpoint are hidden: they come again.
    suffix = f".{time.time_ns()}"  # two lives may begin within a second
    return TensorBoardTracker(run_name, str(folder), purge_step=step + 1, filename_suffix=suffix)


def _wandb(config: TrackingConfig, run_name: str, step: int) -> Any:
    from accelerate.tracking import WandBTracker

    Path(config.folder).mkdir(parents=True, exist_ok=True)
    return WandBTracker(config.project, id=run_name, name=run_name, resume="allow", dir=config.folder)


def _mlflow(config: TrackingConfig, run_name: str, step: int) -> Any:
    import mlflow  # pyright: ignore[reportMissingImports]
    from accelerate.tracking import MLflowTracker

    found = mlflow.search_runs(
        experiment_names=[config.project],
        filter_string=f"tags.`{_MLFLOW_TAG}` = '{run_name}'",
        output_format="list",
    )
    return MLflowTracker(
        config.project,
        run_id=found[0].info.run_id if found else None,
        run_name=run_name,
        tags={_MLFLOW_TAG: run_name},
    )


def _trackio(config: TrackingConfig, run_name: str, step: int) -> Any:
    from accelerate.tracking import TrackioTracker

    return TrackioTracker(config.project, name=run_name, resume="allow")


_MAKE: Mapping[str, Callable[[TrackingConfig, str, int], Any]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
