"""What of a run's checkpoints, versions and logs may go (of the logs: log_retention.py).

Kept is what the config names (RetentionConfig), and whatever anything still needs: what a trainer resumes
from, what a server may have to load again, what a snapshot names together, what is to be evaluated, what
is too young to be sure about. The steps' documents and the metrics are never touched: the books are counted
from them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from model_runtime.checkpoints import checkpoint_steps, read_manifest
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.coordinator import require_leading
from model_runtime.documents import SnapshotDocument, VersionDocument
from model_runtime.errors import CorruptObjectError, ObjectNotFoundError, StoreError, StoreOutageError
from model_runtime.evaluation import EvaluationDocument, not_evaluated, nth_steps, read_evaluations
from model_runtime.layout import EVALUATION_INFIX, ModelLayout, RunLayout, number_in
from model_runtime.log_retention import remove_evaluation_rows, remove_log
from model_runtime.metrics import read_metrics
from model_runtime.store import Store
from model_runtime.summary import mean_reward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Removed:
    """Of one model."""

    model_id: str
    checkpoints: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()
    log_bytes: int = 0


def sweep(
    store: Store, layout: RunLayout, config: RunConfig, *, epoch: int, now: float | None = None
) -> list[Removed]:
    """Remove what the config no longer wants kept and nothing needs; what was removed of each model of which
    anything was. Raises SupersededError when another epoch than this one leads the run."""
    now = time.time() if now is None else now
    removed = [*_sweep_models(store, layout, config, now=now)]
    removed += _sweep_logs(store, layout, config, epoch=epoch, now=now)
    return removed


def remove_leftovers(store: Store, layout: RunLayout) -> None:
    """Remove what killed writers left unfinished of the run and its evaluations."""
    try:
        own = [name for name in store.children("") if name.startswith(f"{layout.run_id}{EVALUATION_INFIX}")]
        num_bytes = sum(store.remove_leftovers(folder) for folder in (layout.run_id, *own))
    except StoreOutageError:
        raise
    except StoreError as error:  # another time
        logger.warning("what killed writers may have left is kept: %s", error)
        return
    if num_bytes:
        logger.info("removed %d bytes that killed writers had left", num_bytes)


def _sweep_models(store: Store, layout: RunLayout, config: RunConfig, *, now: float) -> Iterator[Removed]:
    settings = config.retention
    if settings.keep_last is None:
        return
    try:
        snapshots = _last_snapshots(store, layout, settings.keep_last)
        evaluations = read_evaluations(store, layout)
    except CorruptObjectError as error:  # what is needed can't be told
        logger.error("checkpoints and versions are kept: %s", error)
        return
    for model in config.trainable_models:
        try:
            removed = _sweep_model(store, layout, config, model, snapshots, evaluations, now=now)
        except (CorruptObjectError, ObjectNotFoundError) as error:
            logger.error("%s: its checkpoints and versions are kept: %s", model.model_id, error)
        else:
            yield removed


def _sweep_logs(
    store: Store, layout: RunLayout, config: RunConfig, *, epoch: int, now: float
) -> Iterator[Removed]:
    leading = partial(require_leading, store, layout, epoch)
    for model in config.models:
        place, settings = layout.model(model.model_id), config.retention
        num_bytes = 0
        try:
            num_bytes += remove_evaluation_rows(store, place, settings, now=now, require_leading=leading)
            num_bytes += remove_log(store, place, settings, epoch=epoch, now=now, require_leading=leading)
        except CorruptObjectError as error:  # training needs nothing of it
            logger.error("%s: its log is kept: %s", model.model_id, error)
        if num_bytes:
            yield Removed(model.model_id, log_bytes=num_bytes)


def _sweep_model(
    store: Store,
    layout: RunLayout,
    config: RunConfig,
    model: ModelConfig,
    snapshots: Collection[SnapshotDocument],
    evaluations: Collection[EvaluationDocument],
    *,
    now: float,
) -> Removed:
    """Everything is read before anything is removed. Raises CorruptObjectError and ObjectNotFoundError where
    it can't be told what is needed."""
    settings = config.retention
    place, model_id = layout.model(model.model_id), model.model_id
    steps = checkpoint_steps(store, place)  # newest first
    named = {s.checkpoints[model_id] for s in snapshots if model_id in s.checkpoints}
    kept_steps = {*steps[: settings.keep_last], *_every(steps, settings.keep_every), *(named & {*steps})}
    nth = [read_manifest(store, place, step) for step in nth_steps(store, place, config, model)]
    kept_steps |= {c.step for c in not_evaluated(nth, model_id, evaluations)}
    checkpoints = [read_manifest(store, place, step) for step in sorted(kept_steps)]
    needed = {c.version for c in checkpoints}
    needed |= {s.versions[model_id] for s in snapshots if model_id in s.versions}
    resumed_from = [c.version for c in checkpoints if c.step in steps[: settings.keep_last]]

    versions = _versions(store, place)  # newest first
    served = max(settings.keep_last or 0, model.rollout.max_live_versions + 1)
    needed |= {*versions[:served], *_every(versions, settings.keep_every)}
    needed |= {v for v in versions if v >= min(resumed_from, default=0)}  # a replay finds them as they are
    needed |= _best(store, layout, model_id, versions, settings.keep_best)
    gone_steps = tuple(step for step in steps if step not in kept_steps)
    gone = tuple(
        version
        for version in versions
        if version not in needed and _age_s(store, place, version, now=now) > settings.min_age_s
    )
    for step in gone_steps:
        _remove(store, place.checkpoint(step), place.checkpoint_marker(step))
    for version in gone:
        _remove(store, place.version(version), place.version_marker(version))
    if gone or gone_steps:
        logger.info("%s: removed checkpoints of steps %s and versions %s", model_id, gone_steps, gone)
    return Removed(model_id, gone_steps, gone)


def _remove(store: Store, folder: str, marker: str) -> None:
    """The marker first: what is half removed counts as not there."""
    store.delete(marker)
    for key in store.list(folder):
        store.delete(key)


def _every(numbers: Iterable[int], every: int | None) -> set[int]:
    return set() if every is None else {number for number in numbers if number % every == 0}


def _versions(store: Store, layout: ModelLayout) -> list[int]:
    numbers = sorted((number_in(name) for name in store.children(layout.versions())), reverse=True)
    return [number for number in numbers if store.exists(layout.version_marker(number))]


def _age_s(store: Store, layout: ModelLayout, version: int, *, now: float) -> float:
    key = layout.version_marker(version)
    try:
        return now - VersionDocument.parse(store.get(key), source=store.uri(key)).created_at
    except CorruptObjectError as error:
        logger.warning("v%d is kept, its age is not known: %s", version, error)
        return 0.0


def _last_snapshots(store: Store, layout: RunLayout, count: int) -> list[SnapshotDocument]:
    numbers = sorted((number_in(name) for name in store.children(layout.snapshots())), reverse=True)
    keys = [layout.snapshot(number) for number in numbers[:count]]
    return [SnapshotDocument.parse(store.get(key), source=store.uri(key)) for key in keys]


def _best(store: Store, layout: RunLayout, model_id: str, versions: list[int], count: int) -> set[int]:
    """By the mean reward of its evaluations where there are any, else of the steps trained from it."""
    if not count:
        return set()
    scores: dict[int, list[float]] = defaultdict(list)
    for document in read_evaluations(store, layout):
        version = document.plan.versions.get(model_id)
        if version is not None and document.reward is not None:
            scores[version].append(document.reward.mean)
    if not scores:
        for row in read_metrics(store, layout.model(model_id), "steps"):
            reward = mean_reward(row)
            if reward is not None and row.get("version") is not None:
                scores[int(row["version"])].append(reward)
    known = [version for version in versions if version in scores]
    return set(sorted(known, key=lambda version: statistics.fmean(scores[version]), reverse=True)[:count])
