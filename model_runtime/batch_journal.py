"""The journal of a model's steps: `batches/<step>.json`, written before the step is trained."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from model_runtime.documents import BatchDocument, CheckpointDocument
from model_runtime.layout import ModelLayout, number_in
from model_runtime.store import Store


def journaled_steps(store: Store, layout: ModelLayout) -> set[int]:
    return {number_in(name) for name in store.children(layout.batches())}


def read_batch(store: Store, layout: ModelLayout, step: int) -> BatchDocument:
    key = layout.batch(step)
    return BatchDocument.parse(store.get(key), source=store.uri(key))


def closed_before(store: Store, layout: ModelLayout, resume: CheckpointDocument) -> Iterator[str]:
    """Groups that steps up to the checkpoint trained or closed, so that a late copy of one can't open it
    again. Those at or above the low-water marks stand in the checkpoint itself."""
    yield from resume.closed_groups

    steps = [step for step in journaled_steps(store, layout) if step <= resume.step]
    with ThreadPoolExecutor(max_workers=8) as pool:
        for document in pool.map(partial(read_batch, store, layout), steps):
            yield from document.groups
            yield from (entry.group_id for entry in document.closed_untrained)
