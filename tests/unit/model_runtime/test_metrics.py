"""Metric rows survive writers, replays and values JSON can't hold."""

import pytest

from model_runtime import metrics
from model_runtime.config import StoreConfig
from model_runtime.errors import CorruptObjectError
from model_runtime.layout import RunLayout
from model_runtime.metrics import MetricsWriter, read_metrics
from model_runtime.store import open_store

LAYOUT = RunLayout("run").model("planner")


@pytest.fixture
def store(tmp_path):
    return open_store(StoreConfig(url=str(tmp_path)))


def writer(store, stream="steps", *, epoch=1, incarnation=1):
    return MetricsWriter(store, LAYOUT, stream, epoch=epoch, incarnation=incarnation)


def test_rows_come_back_in_the_order_they_were_written(store):
    out = writer(store, "syncs")
    for version in (1, 2, 2):
        out.append({"version": version})
    assert [row["version"] for row in read_metrics(store, LAYOUT, "syncs")] == [1, 2, 2]


def test_a_stream_nobody_wrote_is_empty(store):
    assert read_metrics(store, LAYOUT, "evaluations") == []


def test_a_full_chunk_is_left_alone(store, monkeypatch):
    monkeypatch.setattr(metrics, "_CHUNK_BYTES", 64)
    out = writer(store)
    for step in range(1, 11):
        out.append({"step": step, "actor/pg_loss": 0.25})
    chunks = store.children(LAYOUT.metrics("steps"))
    assert len(chunks) > 2
    assert all(len(store.get(f"{LAYOUT.metrics('steps')}/{name}")) <= 65 for name in chunks)
    assert [row["step"] for row in read_metrics(store, LAYOUT, "steps")] == list(range(1, 11))


def test_a_restarted_writer_keeps_what_the_one_before_wrote(store):
    writer(store, "syncs").append({"version": 1})
    writer(store, "syncs").append({"version": 2})
    assert [row["version"] for row in read_metrics(store, LAYOUT, "syncs")] == [1, 2]


def test_of_a_replayed_step_the_last_row_counts(store):
    first = writer(store)
    for step in (1, 2, 3):
        first.append({"step": step, "life": 1})
    second = writer(store, incarnation=2)
    for step in (2, 3, 4):
        second.append({"step": step, "life": 2})
    rows = read_metrics(store, LAYOUT, "steps")
    assert [(row["step"], row["life"]) for row in rows] == [(1, 1), (2, 2), (3, 2), (4, 2)]


def test_values_that_are_not_finite_are_null(store):
    writer(store).append({"step": 1, "actor/grad_norm": float("nan"), "critic/score/max": float("inf")})
    assert read_metrics(store, LAYOUT, "steps") == [
        {"step": 1, "actor/grad_norm": None, "critic/score/max": None}
    ]


@pytest.mark.parametrize("data", [b'{"step": 1\n', b"1\n"])
def test_a_damaged_chunk_is_named(store, data):
    store.put(LAYOUT.metrics_file("steps", 1, 1), data)
    with pytest.raises(CorruptObjectError, match=r"00001-00001-00000\.jsonl"):
        read_metrics(store, LAYOUT, "steps")
