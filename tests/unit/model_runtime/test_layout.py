from __future__ import annotations

import pytest

from model_runtime.layout import (
    RunLayout,
    number_in,
    parse_log_shard,
    parse_writer_id,
    served_name,
    writer_id,
)
from model_runtime.store import Store


def test_writer_ids_sort_in_the_order_the_lives_began() -> None:
    lives = [(0, 0), (0, 1), (0, 10), (2, 0), (10, 3)]
    names = [writer_id(*life) for life in lives]
    assert sorted(names) == names
    assert [parse_writer_id(name) for name in names] == lives


@pytest.mark.parametrize("name", ["", "e1-2", "e00001", "x00001-00002", "e00001-00002.tmp"])
def test_other_names_are_no_writer_ids(name: str) -> None:
    with pytest.raises(ValueError, match="not a writer id"):
        parse_writer_id(name)


def test_listing_order_is_numeric_order() -> None:
    model = RunLayout("run").model("a")
    numbers = [0, 9, 10, 99, 100, 12345678]
    for key in (
        lambda n: model.log_shard("w", n),
        lambda n: model.eval_shard("w", n),
        model.batch,
        RunLayout("run").snapshot,
        lambda n: RunLayout("run").journal_entry("w", n),
    ):
        keys = [key(n) for n in numbers]
        assert sorted(keys) == keys
        assert [number_in(k) for k in keys] == numbers


NAMES_OF_FOLDERS = ["a", "log", "eval", "removed", "models", "parquet"]


@pytest.mark.parametrize("model_id", NAMES_OF_FOLDERS)
@pytest.mark.parametrize("run_id", NAMES_OF_FOLDERS)
def test_a_shard_of_a_log_is_told_by_its_key_whatever_run_and_model_are_called(
    run_id: str, model_id: str
) -> None:
    model, writer = RunLayout(run_id).model(model_id), writer_id(1, 2)
    assert parse_log_shard(model.log_shard(writer, 7)) == (model, writer, 7)
    for other in (model.eval_shard(writer, 7), model.removal(7), model.log_writers(), model.batch(7)):
        assert parse_log_shard(other) is None


@pytest.mark.parametrize(
    ("name", "number"),
    [("v12", 12), ("step-7", 7), ("epoch-3.json", 3), ("desired-04.json", 4), ("a@v2", 2), ("v5/", 5)],
)
def test_the_number_of_a_name_is_read(name: str, number: int) -> None:
    assert number_in(name) == number


@pytest.mark.parametrize("name", ["", "run.json", "v", "12a.b.c"])
def test_a_name_without_a_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        number_in(name)


def test_a_version_is_served_under_a_name_of_its_own() -> None:
    assert served_name("planner_model", 3) == "planner_model@v3"


def test_no_two_things_share_a_key_and_all_are_below_the_run(local_store: Store) -> None:
    run = RunLayout("run-1")
    model = run.model("m")
    keys = [
        run.run(),
        run.summary(),
        run.epoch(1),
        run.desired(1),
        run.run_revision(1),
        run.journal_entry("w", 1),
        run.snapshot(1),
        model.log_shard("w", 1),
        model.eval_shard("w", 1),
        model.tokenizer("abc"),
        model.batch(1),
        model.version_marker(1),
        model.checkpoint_marker(1),
        model.metrics_file("steps", 1, 2),
        run.model("m2").batch(1),
    ]
    assert len(set(keys)) == len(keys)
    for key in keys:
        local_store.put(key, key.encode())  # none is the folder of another
    assert local_store.list("run-1") == sorted(keys)


def test_folders_list_what_stands_in_them(local_store: Store) -> None:
    run = RunLayout("run-1")
    model = run.model("m")
    steps = model.metrics_file("steps", 1, 2)
    for folder, key, child in [
        (run.epochs(), run.epoch(3), "epoch-3.json"),
        (run.journal_writers(), run.journal_entry("w", 1), "w"),
        (run.snapshots(), run.snapshot(2), "00000002.json"),
        (model.log_writers(), model.log_shard("w", 0), "w"),
        (model.eval_writers(), model.eval_shard("w", 0), "w"),
        (model.batches(), model.batch(4), "00000004.json"),
        (model.versions(), model.version_marker(2), "v2"),
        (model.version(2), model.version_marker(2), "VERSION.json"),
        (model.checkpoints(), model.checkpoint_marker(8), "step-8"),
        (model.checkpoint(8), model.checkpoint_marker(8), "MANIFEST.json"),
        (model.metrics("steps"), steps, steps.rsplit("/", 1)[-1]),
    ]:
        local_store.put(key, b"")
        assert local_store.children(folder) == [child]
