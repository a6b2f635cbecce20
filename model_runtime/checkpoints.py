"""A trainer's checkpoints: everything it needs to go on exactly where it stood, under one manifest.

Arrays are safetensors and the rest is JSON: reading a checkpoint never runs code from the store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from model_runtime.documents import CheckpointDocument, RememberedGroup
from model_runtime.errors import CorruptObjectError, ObjectNotFoundError
from model_runtime.layout import ModelLayout, number_in
from model_runtime.store import Store

ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
GENERATORS_FILE = "generators.safetensors"
STATE_FILE = "state.json"

Arrays = Mapping[str, npt.NDArray[Any]]

logger = logging.getLogger(__name__)


class Progress(Protocol):
    """What the queue has consumed (training_queue.QueueProgress)."""

    @property
    def low_water(self) -> Mapping[str, int]: ...
    @property
    def consumed(self) -> Any: ...
    @property
    def closed_groups(self) -> Any: ...
    @property
    def totals(self) -> Mapping[str, int]: ...
    @property
    def replay(self) -> Sequence[RememberedGroup]: ...


@dataclass(frozen=True, slots=True, eq=False)
class TrainingState:
    """Weights, optimizer, random generators, and the small things beside them."""

    adapter: Arrays  # float32, by parameter name
    optimizer: Arrays  # "<parameter>.exp_avg" …
    generators: Arrays  # states of the random generators
    values: Mapping[str, Any]  # JSON


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    document: CheckpointDocument
    state: TrainingState


def save_checkpoint(
    store: Store,
    layout: ModelLayout,
    state: TrainingState,
    *,
    step: int,
    epoch: int,
    version: int,
    seed: int,
    progress: Progress,
) -> CheckpointDocument:
    """Write the state of `step`, manifest last. What an earlier life left under this step is replaced."""
    files = {
        ADAPTER_FILE: _dump(state.adapter),
        OPTIMIZER_FILE: _dump(state.optimizer),
        GENERATORS_FILE: _dump(state.generators),
        STATE_FILE: json.dumps(dict(state.values), sort_keys=True).encode(),
    }
    document = CheckpointDocument(
        step=step,
        epoch=epoch,
        version=version,
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        low_water=dict(progress.low_water),
        consumed=sorted(progress.consumed),
        closed_groups=sorted(progress.closed_groups),
        totals=dict(progress.totals),
        replay=list(progress.replay),
        seed=seed,
        created_at=time.time(),
    )
    marker = layout.checkpoint_marker(step)
    store.delete(marker)  # no manifest may ever name files that are being replaced
    for name, data in files.items():
        store.put(f"{layout.checkpoint(step)}/{name}", data)
    store.put(marker, document.to_bytes())
    return document


def load_latest_checkpoint(store: Store, layout: ModelLayout) -> Checkpoint | None:
    """The newest complete checkpoint; None when there is none.

    A damaged one is reported and the one before it taken: the batches in between are replayed, so nothing
    is lost. Raises CorruptObjectError when every one is damaged, instead of beginning anew.
    """
    damaged: CorruptObjectError | None = None
    for step in checkpoint_steps(store, layout):
        try:
            return _load(store, layout, step)
        except CorruptObjectError as error:
            logger.error("checkpoint of step %d is damaged; going back to the one before it: %s", step, error)
            damaged = error
    if damaged is not None:
        raise CorruptObjectError(f"no checkpoint is whole; the last error: {damaged}")
    return None


def checkpoint_steps(store: Store, layout: ModelLayout) -> list[int]:
    """Steps with a manifest, newest first."""
    names = [name for name in store.children(layout.checkpoints()) if re.fullmatch(r"step-\d+", name)]
    steps = sorted((number_in(name) for name in names), reverse=True)
    return [step for step in steps if store.exists(layout.checkpoint_marker(step))]


def read_manifest(store: Store, layout: ModelLayout, step: int) -> CheckpointDocument:
    """What the checkpoint says of itself, without its tensors. Raises CorruptObjectError when it is damaged,
    ObjectNotFoundError when it is gone, as that of a step that is being saved again is for a while."""
    key = layout.checkpoint_marker(step)
    return CheckpointDocument.parse(store.get(key), source=store.uri(key))


def find_manifest(store: Store, layout: ModelLayout, step: int) -> CheckpointDocument | None:
    """The same; None when it is gone or damaged."""
    try:
        return read_manifest(store, layout, step)
    except (ObjectNotFoundError, CorruptObjectError) as error:
        logger.warning("what the checkpoint of step %d needs is not known: %s", step, error)
        return None


def _load(store: Store, layout: ModelLayout, step: int) -> Checkpoint:
    document = read_manifest(store, layout, step)
    state = TrainingState(
        adapter=_read_arrays(store, layout, document, ADAPTER_FILE),
        optimizer=_read_arrays(store, layout, document, OPTIMIZER_FILE),
        generators=_read_arrays(store, layout, document, GENERATORS_FILE),
        values=json.loads(_read(store, layout, document, STATE_FILE)),
    )
    return Checkpoint(document, state)


def _read_arrays(store: Store, layout: ModelLayout, document: CheckpointDocument, name: str) -> Arrays:
    data = _read(store, layout, document, name)
    try:
        return safetensors.numpy.load(data)
    except (ValueError, safetensors.SafetensorError) as error:
        uri = store.uri(f"{layout.checkpoint(document.step)}/{name}")
        raise CorruptObjectError(f"{uri}: not safetensors: {error}") from None


def _read(store: Store, layout: ModelLayout, document: CheckpointDocument, name: str) -> bytes:
    key = f"{layout.checkpoint(document.step)}/{name}"
    try:
        data = store.get(key)
    except ObjectNotFoundError:
        raise CorruptObjectError(f"{store.uri(key)}: named by the manifest, and missing") from None
    got, want = hashlib.sha256(data).hexdigest(), document.files.get(name)
    if got != want:
        raise CorruptObjectError(f"{store.uri(key)}: sha256 is {got}, the manifest says {want}")
    return data


def _dump(arrays: Arrays) -> bytes:
    return safetensors.numpy.save({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)})
