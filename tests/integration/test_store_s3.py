"""The S3 store over HTTP: against moto's server, and against a real endpoint where one is configured.

moto checks no credentials and serves everything at once; what is asked of the real one is what only a real
one can show: access control, conditional writes under contention, other processes' writes.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from boto3.session import Session

from model_runtime.config import StoreConfig
from model_runtime.errors import ObjectExistsError, ObjectNotFoundError, StoreAccessError, StoreError
from model_runtime.store import Store, open_store
from model_runtime.trajectory_log import decode_shard, encode_shard
from model_runtime.types import Shard
from tests import fakes

pytestmark = pytest.mark.integration


@pytest.fixture(
    params=["s3_store_config", pytest.param("real_s3_store_config", marks=pytest.mark.real_s3)],
    ids=["moto", "real"],
)
def config(request: pytest.FixtureRequest) -> StoreConfig:
    return request.getfixturevalue(request.param)


@pytest.fixture
def store(config: StoreConfig) -> Store:
    return open_store(config)


def foreign_client() -> Any:
    """Another program at the same bucket. A session of its own: boto3's shared one keeps old credentials."""
    return Session().client("s3")


def test_the_start_up_probe_passes_and_leaves_nothing(store: Store) -> None:
    store.check()
    assert store.list("") == []
    assert store.children("") == []


def test_what_is_put_is_got_listed_and_deleted(store: Store) -> None:
    store.put("run/models/a/x.json", b"1")
    store.put("run/models/b", b"22")
    store.put("run/models/b", b"333")
    store.put("run/models/bc", b"")

    assert store.get("run/models/b") == b"333"
    assert store.get("run/models/bc") == b""
    assert store.list("run") == ["run/models/a/x.json", "run/models/b", "run/models/bc"]
    assert store.list("run/models/b") == []
    assert store.children("run/models") == ["a", "b", "bc"]
    assert store.children("run/nothing") == store.list("run/nothing") == []
    assert store.exists("run/models/b")
    assert not store.exists("run/models")

    store.delete("run/models/b")
    store.delete("run/models/b")
    assert store.list("run/models") == ["run/models/a/x.json", "run/models/bc"]
    for key in ("run/models/b", "run/models", "run/nothing"):
        with pytest.raises(ObjectNotFoundError, match=f"get s3://.*/{key}: no such object"):
            store.get(key)


def test_creating_twice_is_true_then_false_then_refused(store: Store) -> None:
    assert store.put_if_absent("k", b"same") is True
    assert store.put_if_absent("k", b"same") is False
    with pytest.raises(ObjectExistsError, match=r"create s3://.*/k: .*other bytes"):
        store.put_if_absent("k", b"other")
    assert store.get("k") == b"same"


def test_a_race_of_eight_has_exactly_one_winner_and_its_bytes_stay(store: Store) -> None:
    for round_number in range(5):
        won = fakes.race_to_create(store, f"race/{round_number}", num_threads=8)
        assert len(won) == 1
        assert store.get(f"race/{round_number}") == b"%d" % won[0] * 1000


@pytest.mark.parametrize("num_bytes", [20 * 2**20, 120 * 2**20])
def test_large_objects_are_one_put_with_an_enforced_condition(store: Store, num_bytes: int) -> None:
    """s3fs alone would upload the larger one in parts, where some stores don't enforce the condition."""
    data = os.urandom(2**20) * (num_bytes // 2**20)
    assert store.put_if_absent("big", data) is True
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("big", data[:-1])
    assert store.get("big") == data
    store.delete("big")


def test_another_process_s_writes_are_seen_at_once(store: Store) -> None:
    """A listing cache would hide them, from reads too."""
    other = foreign_client()
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    store.put("dir/mine", b"1")
    assert store.list("dir") == ["dir/mine"]
    assert store.children("dir") == ["mine"]

    other.put_object(Bucket=bucket, Key=f"{prefix}/dir/theirs", Body=b"2")
    assert store.children("dir") == ["mine", "theirs"]
    assert store.exists("dir/theirs")
    assert store.get("dir/theirs") == b"2"

    other.put_object(Bucket=bucket, Key=f"{prefix}/dir/mine", Body=b"replaced, and longer")
    assert store.get("dir/mine") == b"replaced, and longer"
    other.delete_object(Bucket=bucket, Key=f"{prefix}/dir/mine")
    assert not store.exists("dir/mine")
    with pytest.raises(ObjectNotFoundError):
        store.get("dir/mine")
    other.close()


def test_folder_markers_of_other_tools_are_no_objects(store: Store) -> None:
    other = foreign_client()
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    other.put_object(Bucket=bucket, Key=f"{prefix}/dir/", Body=b"")
    store.put("dir/x", b"1")
    assert store.list("dir") == ["dir/x"]
    assert store.children("dir") == ["x"]
    other.close()


def test_readers_never_see_half_an_object(store: Store) -> None:
    versions = [bytes([i]) * 500_000 for i in range(4)]
    store.put("pointer", versions[0])
    done = threading.Event()

    def read() -> int:
        seen = 0
        while not done.is_set():
            assert store.get("pointer") in versions
            seen += 1
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for i in range(20):
            store.put("pointer", versions[i % 4])
        done.set()
        assert all(reader.result() > 0 for reader in readers)


def test_listings_longer_than_a_page_are_whole(store: Store) -> None:
    keys = [f"many/{i // 100:02d}/{i:05d}" for i in range(1050)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert store.list("many") == keys
    assert store.children("many") == [f"{i:02d}" for i in range(11)]


def test_a_shard_survives_the_store(store: Store) -> None:
    shard = Shard((fakes.make_trajectory(reward=1.0),), (fakes.make_settlement(),))
    assert store.put_if_absent("log/0.parquet", encode_shard(shard))
    (row,) = decode_shard(store.get("log/0.parquet"), source="log/0.parquet").trajectories
    assert row.trajectory_id == shard.trajectories[0].trajectory_id


def _write_from_child(config: dict, key: str) -> None:
    open_store(StoreConfig.model_validate(config)).put(key, b"from a child")


def test_the_store_works_in_a_spawned_process(store: Store, config: StoreConfig) -> None:
    store.put("parent", b"1")
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_write_from_child, args=(config.model_dump(), "child"))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert store.get("child") == b"from a child"


@pytest.mark.usefixtures("config")
def test_a_missing_bucket_is_named_and_not_created() -> None:
    missing = open_store(StoreConfig(url="s3://no-such-bucket-here/runs"))
    with pytest.raises(StoreError, match="there is no bucket 'no-such-bucket-here'; create it first"):
        missing.check()
    with pytest.raises(StoreError, match="there is no bucket"):
        missing.put("k", b"1")
    client = foreign_client()
    assert "no-such-bucket-here" not in {b["Name"] for b in client.list_buckets()["Buckets"]}
    client.close()


@pytest.mark.real_s3
@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_wrong_key_is_an_access_error_that_keeps_the_secret(
    real_s3_store_config: StoreConfig, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv(wrong, "wrong-topsecret")
    store = open_store(real_s3_store_config)
    for operation in (
        store.check,
        lambda: store.get("k"),
        lambda: store.exists("k"),
        lambda: store.put("k", b"1"),
        lambda: store.put_if_absent("k", b"1"),
        lambda: store.list(""),
        lambda: store.delete("k"),
    ):
        with pytest.raises(StoreAccessError, match="AWS_ACCESS_KEY_ID") as caught:
            operation()
        assert "wrong-topsecret" not in str(caught.value)
