"""What the parent of a run writes: who leads, what it wants, where things are, and which versions belong
together.

An *epoch* is one life of the parent. Whoever sees a higher one than its own stops. `desired` objects are
numbered; the highest number counts, and within an epoch `stop` is never taken back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from model_runtime.checkpoints import read_manifest
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.documents import (
    CheckpointDocument,
    DesiredDocument,
    DesiredState,
    EpochClaim,
    RunDocument,
    SnapshotDocument,
)
from model_runtime.errors import (
    ConfigError,
    CorruptObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreUnavailableError,
    SupersededError,
)
from model_runtime.layout import EVALUATION_INFIX, RunLayout, number_in
from model_runtime.store import Store

logger = logging.getLogger(__name__)

_MAX_CLAIM_ATTEMPTS = 20

# Settings of a model that the log, the versions or the checkpoints already depend on.
_FIXED_MODEL_FIELDS = ("kind", "model_path", "adapter_path", "lora")


# ------------------------------------------------------------------------------------------------ epochs


def latest_epoch(store: Store, layout: RunLayout) -> int | None:
    """The epoch that leads this run; None when nobody ever did."""
    return max(_numbers(store, layout, "epoch-"), default=None)


def claim_epoch(
    store: Store, layout: RunLayout, *, flow_run_id: str | None = None, host: str = ""
) -> EpochClaim:
    """Lead the run from now on: create the next epoch. Of two parents at once the higher number leads."""
    for _ in range(_MAX_CLAIM_ATTEMPTS):
        epoch = (latest_epoch(store, layout) or 0) + 1
        claim = EpochClaim(epoch=epoch, claimed_at=time.time(), flow_run_id=flow_run_id, host=host)
        try:
            if store.put_if_absent(layout.epoch(epoch), claim.to_bytes()):
                return claim
        except ObjectExistsError:
            continue  # another parent took this number; it is theirs
    raise StoreUnavailableError(
        f"no epoch of run {layout.run_id!r} could be claimed at {store.url} in {_MAX_CLAIM_ATTEMPTS} tries: "
        "other launches of the same run keep winning; stop them"
    )


def require_leading(store: Store, layout: RunLayout, epoch: int) -> None:
    """Raise SupersededError when a newer epoch leads the run."""
    newest = latest_epoch(store, layout) or 0
    if newest > epoch:
        raise SupersededError(
            f"run {layout.run_id!r}: epoch {newest} leads, this process belongs to epoch {epoch}"
        )


# ----------------------------------------------------------------------------------------- desired state


def read_desired(store: Store, layout: RunLayout) -> DesiredDocument | None:
    """What the parent last wanted; None before it said anything."""
    seq = max(_numbers(store, layout, "desired-"), default=None)
    if seq is None:
        return None
    key = layout.desired(seq)
    return DesiredDocument.parse(store.get(key), source=store.uri(key))


def write_desired(
    store: Store, layout: RunLayout, *, epoch: int, state: DesiredState, reason: str = ""
) -> DesiredDocument:
    """Say what this epoch wants. Raises SupersededError when a newer epoch has already spoken.

    After `stop` the same epoch can't want anything else: the stop stands and is returned.
    """
    for _ in range(_MAX_CLAIM_ATTEMPTS):
        last = read_desired(store, layout)
        if last is not None and last.epoch > epoch:
            raise SupersededError(f"run {layout.run_id!r}: epoch {last.epoch} leads, not {epoch}")
        if last is not None and last.epoch == epoch and (last.state == "stop" or last.state == state):
            return last
        wanted = DesiredDocument(
            seq=last.seq + 1 if last else 1, epoch=epoch, state=state, reason=reason, written_at=time.time()
        )
        try:
            if store.put_if_absent(layout.desired(wanted.seq), wanted.to_bytes()):
                return wanted
        except ObjectExistsError:
            continue  # somebody wrote this number first; read what they want
    raise StoreUnavailableError(f"{store.uri(layout.epochs())}: desired state {state!r} could not be written")


# ---------------------------------------------------------------------------------------------- run.json
#
# Numbered revisions, each created once from the one before it, so that no change undoes one it has not seen;
# the highest counts. run.json itself is a copy of it, for people and programs that want one file to read.


def read_run(store: Store, layout: RunLayout) -> RunDocument | None:
    """What run.json says, or None when the run does not exist."""
    return _newest_run(store, layout)[1]


def begin_run(store: Store, layout: RunLayout, config: RunConfig, *, epoch: int) -> RunDocument:
    """Write run.json for this epoch. Raises ConfigError when the run can't go on under this config,
    SupersededError when a newer epoch has begun it."""

    def begun(before: RunDocument | None) -> RunDocument:
        _refuse_unsafe(before, layout, config)
        now = time.time()
        return RunDocument(
            run_id=layout.run_id,
            config=config.model_dump(mode="json"),
            epoch=epoch,
            latest_snapshot=before.latest_snapshot if before else None,
            created_at=before.created_at if before else now,
            updated_at=now,
        )

    return _replace_run(store, layout, begun, epoch=epoch)


def update_run(store: Store, layout: RunLayout, *, epoch: int, **changes: Any) -> RunDocument:
    """Replace fields of run.json. Raises SupersededError when it belongs to a newer epoch."""

    def changed(before: RunDocument | None) -> RunDocument:
        if before is None:
            raise ObjectNotFoundError(f"{store.uri(layout.run())}: the run has no run.json")
        return before.model_copy(update={**changes, "updated_at": time.time()})

    return _replace_run(store, layout, changed, epoch=epoch)


def _replace_run(
    store: Store, layout: RunLayout, change: Callable[[RunDocument | None], RunDocument], *, epoch: int
) -> RunDocument:
    """Make what `change` makes of the newest revision the newest one. Of two writers at once the later one
    changes what the earlier one left, unless that is of a newer epoch: raises SupersededError."""
    for _ in range(_MAX_CLAIM_ATTEMPTS):
        number, before = _newest_run(store, layout)
        if before is not None and before.epoch > epoch:
            raise SupersededError(f"run {layout.run_id!r}: epoch {before.epoch} leads, not {epoch}")
        document = change(before)
        try:
            store.put_if_absent(layout.run_revision(number + 1), document.to_bytes())
        except ObjectExistsError:
            continue  # somebody wrote this number first
        if _show_newest(store, layout) == number + 1:
            return document
        # Either somebody went on from it, or its number was one that is removed and below the newest.
    raise StoreUnavailableError(
        f"{store.uri(layout.run())}: others keep writing it, {_MAX_CLAIM_ATTEMPTS} tries to change it failed"
    )


def _newest_run(store: Store, layout: RunLayout) -> tuple[int, RunDocument | None]:
    """(number of the newest revision, what it says). Where there is none run.json itself is revision 0."""
    for _ in range(_MAX_CLAIM_ATTEMPTS):
        number = max(_numbers(store, layout, "run-"), default=0)
        key = layout.run_revision(number) if number else layout.run()
        try:
            return number, RunDocument.parse(store.get(key), source=store.uri(key))
        except ObjectNotFoundError:
            if not number:
                return 0, None  # else newer ones came, and this one is removed
    raise StoreUnavailableError(f"{store.uri(layout.run())}: is replaced faster than it can be read")


def _show_newest(store: Store, layout: RunLayout) -> int:
    """Copy the newest revision to run.json, whoever else does at the same time; its number. The one before it
    is kept for who is about to read it, older ones are removed."""
    shown: tuple[int, RunDocument | None] | None = None
    while (newest := _newest_run(store, layout)) != shown:
        shown = newest
        if newest[1] is not None:
            store.put(layout.run(), newest[1].to_bytes())
    for number in _numbers(store, layout, "run-"):
        if number < newest[0] - 1:
            store.delete(layout.run_revision(number))
    return newest[0]


def refuse_unsafe_resume(store: Store, layout: RunLayout, config: RunConfig) -> RunDocument | None:
    """Raise ConfigError naming the first setting that the run's log, versions or checkpoints depend on and
    that differs now; anything else (learning rate, timeouts, replicas…) may change from life to life. So may
    all of a run that works on an evaluation: each life does the whole of it, and its plan is in its id.

    Returns the run's document as it is, None for a new run.
    """
    document = read_run(store, layout)
    _refuse_unsafe(document, layout, config)
    return document


def _refuse_unsafe(before: RunDocument | None, layout: RunLayout, config: RunConfig) -> None:
    if before is not None and EVALUATION_INFIX not in layout.run_id:
        _compare(layout.run_id, before.config, config)


def _compare(run_id: str, before: dict[str, Any], config: RunConfig) -> None:
    advice = f"restore it, or start a new run instead of resuming {run_id!r}"
    old_models = {m["model_id"]: m for m in before["multi_model"]["models"]}
    new_models = {m.model_id: m for m in config.models}
    if set(old_models) != set(new_models):
        raise ConfigError(
            f"multi_model.models: run {run_id!r} has {sorted(old_models)}, "
            f"this config {sorted(new_models)}; {advice}"
        )
    for model_id, model in new_models.items():
        _refuse_changed_model(model, old_models[model_id], advice)
    old_routes = {r["agent_id"]: r["model_id"] for r in before["agent_model_mapping"]}
    for agent_id in sorted(old_routes.keys() | config.agent_to_model.keys()):
        old, new = old_routes.get(agent_id), config.agent_to_model.get(agent_id)
        if old != new:
            raise ConfigError(
                f"agent_model_mapping.{agent_id}: was {old!r} in this run, is {new!r} now; {advice}"
            )
    old_size, new_size = before["workflow"]["group_size"], config.workflow.group_size
    if old_size != new_size:
        raise ConfigError(f"workflow.group_size: was {old_size} in this run, is {new_size} now; {advice}")


def _refuse_changed_model(model: ModelConfig, before: dict[str, Any], advice: str) -> None:
    now = model.model_dump(mode="json")
    for name in _FIXED_MODEL_FIELDS:
        if before.get(name) != now[name]:
            raise ConfigError(
                f"multi_model.models.{model.model_id}.{name}: was {before.get(name)!r} in this run, "
                f"is {now[name]!r} now; {advice}"
            )


# --------------------------------------------------------------------------------------------- snapshots


@dataclass(slots=True)
class CheckpointCoordinator:
    """Names one checkpoint and version per trainable model together, each time all of them have moved on."""

    store: Store
    layout: RunLayout
    model_ids: tuple[str, ...]
    epoch: int
    _last_steps: dict[str, int] = field(default_factory=dict)
    _damaged: set[tuple[str, int]] = field(default_factory=set)  # (model_id, step), as far as told

    def snapshot(self, *, final: bool = False) -> SnapshotDocument | None:
        """Write the next snapshot if every model has a newer checkpoint than in the last one (`final`: if any
        has). None when there is nothing new, or a model has no checkpoint yet."""
        checkpoints = {model_id: self._latest_checkpoint(model_id) for model_id in self.model_ids}
        found = {model_id: c for model_id, c in checkpoints.items() if c is not None}
        if not found or (len(found) < len(self.model_ids) and not final):
            return None
        moved = [c.step > self._last_steps.get(model_id, -1) for model_id, c in found.items()]
        if not (any(moved) if final else all(moved)):
            return None
        document = self._write(found)
        self._last_steps = dict(document.checkpoints)
        return document

    def _write(self, found: dict[str, CheckpointDocument]) -> SnapshotDocument:
        document = SnapshotDocument(
            number=0,
            epoch=self.epoch,
            versions={model_id: c.version for model_id, c in found.items()},
            checkpoints={model_id: c.step for model_id, c in found.items()},
            created_at=time.time(),
        )
        for _ in range(_MAX_CLAIM_ATTEMPTS):
            numbers = [number_in(name) for name in self.store.children(self.layout.snapshots())]
            document = document.model_copy(update={"number": max(numbers, default=0) + 1})
            try:
                self.store.put_if_absent(self.layout.snapshot(document.number), document.to_bytes())
            except ObjectExistsError:
                continue  # a parent of another epoch took this number
            update_run(self.store, self.layout, epoch=self.epoch, latest_snapshot=document.number)
            return document
        raise StoreUnavailableError(f"{self.store.uri(self.layout.snapshots())}: others keep writing there")

    def _latest_checkpoint(self, model_id: str) -> CheckpointDocument | None:
        """The newest whose manifest can be read, as the one a trainer goes on from."""
        layout = self.layout.model(model_id)
        steps = sorted((number_in(name) for name in self.store.children(layout.checkpoints())), reverse=True)
        for step in steps:
            try:
                return read_manifest(self.store, layout, step)
            except ObjectNotFoundError:  # it is still being written, or is written again
                continue
            except CorruptObjectError as error:
                if (model_id, step) not in self._damaged:
                    logger.error("%s: no snapshot names the checkpoint of step %d: %s", model_id, step, error)
                    self._damaged.add((model_id, step))
        return None


def _numbers(store: Store, layout: RunLayout, prefix: str) -> list[int]:
    return [number_in(name) for name in store.children(layout.epochs()) if name.startswith(prefix)]
