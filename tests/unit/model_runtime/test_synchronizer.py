from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_runtime import adapters
from model_runtime.adapters import AdapterFiles, write_version
from model_runtime.config import ModelConfig
from model_runtime.documents import VersionDocument
from model_runtime.errors import (
    AdapterLoadError,
    CanaryMismatchError,
    CorruptObjectError,
    ObjectNotFoundError,
    PublishError,
    StoreUnavailableError,
)
from model_runtime.layout import ModelLayout, RunLayout
from model_runtime.store import Store
from model_runtime.synchronizer import ParameterSynchronizer, SyncLimits
from model_runtime.versions import VersionTracker
from tests.fake_servers import FakeReplica, make_adapter_files, make_canary, until

LAYOUT = RunLayout("run").model("m")
LIMITS = SyncLimits(
    room_s=0.2, attempt_s=0.5, retry_wait_s=0.01, load_s=1, verify_s=1, flip_s=0.2, restore_pause_s=0.01
)


class Bench:
    """A synchronizer with fake replicas and a real store; `commit` plays the trainer."""

    def __init__(self, store: Store, folder: Path, replicas: Sequence[FakeReplica], **options: Any) -> None:
        self.store = store
        self.folder = folder
        self.replicas = list(replicas)
        self.versions = VersionTracker("m")
        self.rows: list[dict[str, Any]] = []
        self.flips: list[int] = []
        self.flip_error: PublishError | None = None
        self.changes = 0
        self.files: dict[int, AdapterFiles] = {}
        model = options.pop("model", {})
        settings: dict[str, Any] = {
            "model": ModelConfig.model_validate({"model_id": "m", "model_path": "/m"} | model),
            "store": store,
            "layout": LAYOUT,
            "folder": folder,
            "replicas": self.replicas,
            "versions": self.versions,
            "record": self.rows.append,
            "flip": self.flip,
            "limits": LIMITS,
            "on_change": self.changed,
        }
        self.synchronizer = ParameterSynchronizer(**settings | options)

    def commit(self, version: int, *, canary: bool = True) -> None:
        self.files[version] = files = make_adapter_files(version)
        before = self.files.get(version - 1)
        write_version(
            self.store,
            LAYOUT,
            files,
            version=version,
            step=10 * version,
            epoch=1,
            canary=make_canary(files.weights, before.weights if before else None) if canary else [],
        )

    async def publish(self, version: int) -> Any:
        self.commit(version)
        return await self.synchronizer.publish(version)

    async def flip(self, version: int) -> None:
        if self.flip_error is not None:
            raise self.flip_error
        self.flips.append(version)

    def changed(self) -> None:
        self.changes += 1

    def served(self, replica: int = 0) -> list[str]:
        return list(self.replicas[replica].client.adapters)


@pytest.fixture
def bench(local_store: Store, tmp_path: Path) -> Bench:
    return Bench(local_store, tmp_path / "adapters", [FakeReplica("m-0"), FakeReplica("m-1")])


# ------------------------------------------------------------------ the way it goes


async def test_a_published_version_is_loaded_everywhere_verified_and_flipped(bench: Bench) -> None:
    report = await bench.publish(0)
    assert bench.served(0) == bench.served(1) == ["m@v0"]
    assert bench.flips == [0]
    assert bench.versions.published == 0
    assert bench.versions.live == [0]
    assert (report.version, report.step, report.replicas) == (0, 0, ("m-0", "m-1"))
    assert report.canary_max_diff == 0.0
    assert list(report.timings_s) == ["fetch", "room", "load", "verify", "flip", "total"]


async def test_each_publish_leaves_a_row_in_the_metrics(bench: Bench) -> None:
    await bench.publish(0)
    await bench.publish(1)
    first, second = bench.rows
    assert (first["version"], second["version"], second["step"]) == (0, 1, 10)
    assert second["replicas"] == ["m-0", "m-1"]
    assert second["total_s"] >= second["load_s"] >= 0
    assert second["num_bytes"] == len(bench.files[1].weights)


async def test_the_old_version_serves_until_the_flip(bench: Bench) -> None:
    await bench.publish(0)
    seen: list[tuple[list[str], int | None]] = []

    async def flip(version: int) -> None:
        seen.append((bench.served(), bench.versions.published))

    bench.synchronizer._flip = flip
    await bench.publish(1)
    assert seen == [(["m@v0", "m@v1"], 0)]


async def test_replicas_load_in_parallel(bench: Bench) -> None:
    for replica in bench.replicas:
        replica.client.load_s = 0.1
    report = await bench.publish(0)
    assert report.timings_s["load"] < 0.19


async def test_the_canary_is_asked_under_a_salt_of_its_own_each_time(bench: Bench) -> None:
    await bench.publish(0)
    salts = [salt for replica in bench.replicas for salt in replica.client.salts]
    assert None not in salts
    assert len(set(salts)) == len(salts) == 2


async def test_publishing_the_published_version_again_changes_nothing(bench: Bench) -> None:
    await bench.publish(0)
    report = await bench.synchronizer.publish(0)
    assert report.replicas == ("m-0", "m-1")
    assert bench.flips == [0]
    assert len(bench.rows) == 1


async def test_versions_may_be_skipped_but_never_go_back(bench: Bench) -> None:
    bench.commit(1)
    await bench.publish(2)
    with pytest.raises(PublishError, match="v2 is published; versions only rise"):
        await bench.synchronizer.publish(1)


async def test_a_frozen_base_is_served_without_loading_anything(local_store: Store, tmp_path: Path) -> None:
    bench = Bench(local_store, tmp_path, [FakeReplica()], model={"kind": "frozen"})
    bench.replicas[0].client.base = ["m@v0"]
    report = await bench.synchronizer.publish(0)
    assert bench.versions.published == 0
    assert report.canary_max_diff is None
    assert bench.replicas[0].client.log == []


async def test_the_base_is_no_version_of_a_frozen_model_with_another_name(
    local_store: Store, tmp_path: Path
) -> None:
    bench = Bench(local_store, tmp_path, [FakeReplica()], model={"kind": "frozen"})
    with pytest.raises(AdapterLoadError, match="does not list m@v0"):
        await bench.synchronizer.publish(0)


async def test_a_slow_sync_can_be_injected_and_is_seen_in_the_timings(
    local_store: Store, tmp_path: Path
) -> None:
    delayed = []

    async def before_load(version: int) -> None:
        delayed.append(version)
        await asyncio.sleep(0.05)

    bench = Bench(local_store, tmp_path, [FakeReplica()], before_load=before_load)
    report = await bench.publish(0)
    assert delayed == [0]
    assert report.timings_s["delay"] >= 0.05


# ------------------------------------------------------------------ what it must notice


async def test_a_server_that_skips_loading_is_caught_by_readback(bench: Bench) -> None:
    await bench.publish(0)
    for replica in bench.replicas:
        replica.client.skip_loading = True
    with pytest.raises(AdapterLoadError, match="does not list m@v1 after loading it"):
        await bench.publish(1)
    assert bench.flips == [0]
    assert bench.versions.published == 0
    assert bench.served() == ["m@v0"]


async def test_a_server_that_lists_the_name_but_serves_old_weights_is_caught_by_the_canary(
    bench: Bench,
) -> None:
    await bench.publish(0)
    for replica in bench.replicas:
        replica.client.serve_stale = True
    with pytest.raises(CanaryMismatchError, match=r"m@v1 on m-\d: logprobs differ"):
        await bench.publish(1)
    assert bench.flips == [0]
    assert bench.served(0) == bench.served(1) == ["m@v0"]


async def test_without_readback_and_canary_skipped_loading_would_go_unnoticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: it is these two checks that catch it, and nothing else."""

    async def trust(self: ParameterSynchronizer, replica: FakeReplica, version: int) -> None:
        return None

    monkeypatch.setattr(ParameterSynchronizer, "_verify", trust)
    for replica in bench.replicas:
        replica.client.skip_loading = True
    await bench.publish(0)
    assert bench.flips == [0]
    assert bench.served() == []


async def test_a_version_that_is_not_committed_is_not_published(bench: Bench) -> None:
    with pytest.raises(ObjectNotFoundError, match="v0"):
        await bench.synchronizer.publish(0)


async def test_a_version_whose_bytes_are_not_what_its_marker_says_is_not_published(bench: Bench) -> None:
    bench.commit(0)
    bench.store.put(f"{LAYOUT.version(0)}/adapter_model.safetensors", make_adapter_files(9).weights)
    with pytest.raises(CorruptObjectError, match="sha256"):
        await bench.synchronizer.publish(0)
    assert bench.replicas[0].client.log == []


# ------------------------------------------------------------------ failures and retries


async def test_a_failed_publish_leaves_the_old_version_and_can_be_repeated(bench: Bench) -> None:
    await bench.publish(0)
    for replica in bench.replicas:
        replica.client.down = True
    with pytest.raises(AdapterLoadError, match="connection refused"):
        await bench.publish(1)
    assert bench.versions.published == 0
    assert all(replica.ready for replica in bench.replicas)
    for replica in bench.replicas:
        replica.client.down = False
    await bench.synchronizer.publish(1)
    assert bench.versions.published == 1


async def test_an_answer_lost_after_loading_is_no_failure(bench: Bench) -> None:
    bench.commit(0)
    client = bench.replicas[0].client
    original = client.load_adapter

    async def lose_once(name: str, path: str, *, timeout_s: float) -> None:
        client.load_adapter = original
        client.fail_next = 1
        await original(name, path, timeout_s=timeout_s)

    client.load_adapter = lose_once
    await bench.synchronizer.publish(0)
    assert client.log == ["load m@v0", "unload m@v0", "load m@v0"]
    assert bench.versions.published == 0


async def test_a_replica_that_fails_leaves_the_ready_set_and_comes_back(bench: Bench) -> None:
    await bench.publish(0)
    sick = bench.replicas[1]
    sick.client.down = True
    report = await bench.publish(1)
    assert report.replicas == ("m-0",)
    assert list(report.failed_replicas) == ["m-1"]
    assert not sick.ready
    assert not bench.synchronizer.serves(sick, 1)
    sick.client.down = False
    await until(lambda: sick.ready)
    assert bench.synchronizer.serves(sick, 1)
    assert "m@v1" in bench.served(1)


async def test_a_replica_that_can_not_be_restored_has_its_server_restarted(bench: Bench) -> None:
    await bench.publish(0)
    sick = bench.replicas[1]
    sick.client.serve_stale = True
    await bench.publish(1)
    await until(lambda: sick.restart_reason)
    assert "logprobs differ" in str(sick.restart_reason)
    assert not sick.ready


async def test_a_server_that_was_restarted_meanwhile_is_not_restarted_again(bench: Bench) -> None:
    sick, tries = bench.replicas[1], 0
    await bench.publish(0)

    async def restore(replica: FakeReplica) -> None:
        nonlocal tries
        tries += 1
        if tries == LIMITS.restores:
            replica.restart()  # by the watch over the servers
        raise PublishError("connection refused")

    bench.synchronizer.restore = restore
    sick.client.serve_stale = True
    await bench.publish(1)
    await until(lambda: not bench.synchronizer._restoring)
    assert tries == LIMITS.restores
    assert sick.restart_reason is None


async def test_a_hung_server_costs_its_limit_and_not_more(local_store: Store, tmp_path: Path) -> None:
    bench = Bench(local_store, tmp_path, [FakeReplica()], limits=replace(LIMITS, load_s=0.05))
    bench.replicas[0].client.load_s = 60
    with pytest.raises(AdapterLoadError, match=r"m-0: loading m@v0 took longer than 0\.05 s"):
        await bench.publish(0)


async def test_without_a_ready_replica_nothing_is_published(bench: Bench) -> None:
    for replica in bench.replicas:
        replica.ready = False
    with pytest.raises(PublishError, match="no rollout server of m is ready"):
        await bench.publish(0)


async def test_a_flip_the_gateway_did_not_answer_is_repeated_without_loading_again(bench: Bench) -> None:
    await bench.publish(0)
    bench.flip_error = PublishError("the gateway did not acknowledge")
    with pytest.raises(PublishError, match="did not acknowledge"):
        await bench.publish(1)
    assert bench.versions.announced == 1
    assert bench.versions.published == 0
    bench.flip_error = None
    before = list(bench.replicas[0].client.log)
    await bench.synchronizer.publish(1)
    assert bench.versions.published == 1
    assert bench.replicas[0].client.log == before


async def test_a_failed_publish_leaves_a_row_too(bench: Bench) -> None:
    bench.flip_error = PublishError("the gateway did not acknowledge")
    with pytest.raises(PublishError):
        await bench.publish(0)
    (row,) = bench.rows
    assert (row["version"], row["error"]) == (0, "the gateway did not acknowledge")


async def test_a_version_acknowledged_after_its_publish_gave_up_is_reported_by_the_next(bench: Bench) -> None:
    bench.flip_error = PublishError("the gateway did not acknowledge")
    with pytest.raises(PublishError):
        await bench.publish(0)
    bench.versions.acknowledge(0)  # the answer to a later renewal
    bench.flip_error = None
    report = await bench.synchronizer.publish(0)
    assert report.canary_max_diff == 0.0
    assert ["error" in row for row in bench.rows] == [True, False]


async def test_a_row_that_can_not_be_written_does_not_undo_the_publish(
    local_store: Store, tmp_path: Path
) -> None:
    def refuse(row: Any) -> None:
        raise StoreUnavailableError("the store is away")

    bench = Bench(local_store, tmp_path, [FakeReplica()], record=refuse)
    await bench.publish(0)
    assert bench.versions.published == 0


async def test_a_cancelled_publish_leaves_the_old_version_and_can_be_repeated(bench: Bench) -> None:
    await bench.publish(0)
    for replica in bench.replicas:
        replica.client.load_s = 0.1
    bench.commit(1)
    task = asyncio.create_task(bench.synchronizer.publish(1))
    await until(lambda: "load m@v1" in bench.replicas[0].client.log)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert bench.versions.live == [0]
    await bench.synchronizer.publish(1)
    assert bench.versions.published == 1


# ------------------------------------------------------------------ restoring


async def test_a_restarted_replica_has_every_live_version_before_it_is_ready(bench: Bench) -> None:
    await bench.publish(0)
    await bench.publish(1)
    replica = bench.replicas[0]
    replica.restart()
    assert not bench.synchronizer.serves(replica, 1)
    await bench.synchronizer.restore(replica)
    assert bench.served(0) == ["m@v0", "m@v1"]
    assert bench.synchronizer.serves(replica, 1)
    assert len(replica.client.salts) == 2


async def test_a_restarted_replica_that_serves_other_weights_is_not_restored(bench: Bench) -> None:
    await bench.publish(0)
    replica = bench.replicas[0]
    replica.restart()
    replica.client.serve_stale = True
    with pytest.raises(CanaryMismatchError):
        await bench.synchronizer.restore(replica)
    assert not bench.synchronizer.serves(replica, 0)


async def test_restoring_waits_for_a_publish_under_way_and_brings_its_version_too(bench: Bench) -> None:
    await bench.publish(0)
    bench.replicas[0].client.load_s = 0.05
    publishing = asyncio.create_task(bench.publish(1))
    await until(lambda: "load m@v1" in bench.replicas[0].client.log)
    bench.replicas[1].restart()
    await bench.synchronizer.restore(bench.replicas[1])
    await publishing
    # The publish may have found the replica gone and restores it too: what counts is where they end.
    await until(lambda: bench.synchronizer.serves(bench.replicas[1], 1))
    assert "m@v1" in bench.served(1)


async def test_a_replica_that_comes_back_during_a_publish_is_held_back_until_it_has_the_version(
    bench: Bench,
) -> None:
    await bench.publish(0)
    late = bench.replicas[1]
    late.ready = False
    bench.replicas[0].client.load_s = 0.05
    ready_at_flip = []

    async def flip(version: int) -> None:
        ready_at_flip.append(late.ready)

    bench.synchronizer._flip = flip
    publishing = asyncio.create_task(bench.publish(1))
    await until(lambda: "load m@v1" in bench.replicas[0].client.log)
    late.ready = True
    await publishing
    assert ready_at_flip == [False]
    await until(lambda: late.ready)
    assert bench.synchronizer.serves(late, 1)


# ------------------------------------------------------------------ versions that leave


async def test_a_version_leaves_servers_and_disk_once_nothing_uses_it(bench: Bench) -> None:
    await bench.publish(0)
    await bench.publish(1)
    await bench.synchronizer.unload_idle({0: 2, 1: 5})
    assert bench.versions.live == [0, 1]
    assert (bench.folder / "v0").is_dir()
    await bench.synchronizer.unload_idle({1: 5})
    assert bench.versions.live == [1]
    assert bench.served() == ["m@v1"]
    assert [path.name for path in bench.folder.iterdir()] == ["v1"]


async def test_what_a_killed_process_left_of_an_old_version_s_copy_leaves_the_disk_too(bench: Bench) -> None:
    for version in (0, 3):
        (bench.folder / f".v{version}-ab_12" / "fresh").mkdir(parents=True)
    await bench.publish(0)
    await bench.publish(1)
    await bench.synchronizer.unload_idle({1: 5})
    assert sorted(path.name for path in bench.folder.iterdir()) == [".v3-ab_12", "v1"]


async def test_the_published_version_never_leaves(bench: Bench) -> None:
    await bench.publish(0)
    await bench.synchronizer.unload_idle({})
    assert bench.served() == ["m@v0"]


async def test_counts_from_before_a_flip_unload_nothing_after_it(bench: Bench) -> None:
    await bench.publish(0)
    await bench.synchronizer.unload_idle({})
    await bench.publish(1)
    await bench.synchronizer._drop_idle()
    assert bench.versions.live == [0, 1]


async def fill_up(bench: Bench) -> None:
    """Three versions are live, the older two in use: there is no slot for a fourth."""
    for version in (0, 1, 2):
        await bench.publish(version)
        await bench.synchronizer.unload_idle({0: 1, 1: 1})


async def test_a_publish_waits_for_a_slot_until_an_old_version_is_idle(bench: Bench) -> None:
    await fill_up(bench)
    publishing = asyncio.create_task(bench.publish(3))
    await asyncio.sleep(0.05)
    assert "load m@v3" not in bench.replicas[0].client.log
    await bench.synchronizer.unload_idle({1: 1})
    await publishing
    assert bench.versions.live == [1, 2, 3]


async def test_a_later_publish_does_not_pass_one_whose_adapter_takes_longer_to_fetch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.publish(0)
    read = adapters.read_version

    def slow_for_the_first(store: Store, layout: ModelLayout, version: int, folder: Path) -> VersionDocument:
        if version == 1:
            time.sleep(0.3)
        return read(store, layout, version, folder)

    monkeypatch.setattr(adapters, "read_version", slow_for_the_first)
    publishing = [asyncio.create_task(bench.publish(version)) for version in (1, 2)]
    reports = await asyncio.wait_for(asyncio.gather(*publishing), 10)
    assert [report.version for report in reports] == [1, 2]
    assert [line for line in bench.replicas[0].client.log if line.startswith("load m@v")] == [
        "load m@v0",
        "load m@v1",
        "load m@v2",
    ]
    assert bench.versions.published == 2


async def test_a_server_that_comes_back_is_restored_while_a_publish_waits_for_a_slot(
    local_store: Store, tmp_path: Path
) -> None:
    limits = replace(LIMITS, room_s=30)
    bench = Bench(local_store, tmp_path / "adapters", [FakeReplica("m-0"), FakeReplica("m-1")], limits=limits)
    await fill_up(bench)
    publishing = asyncio.create_task(bench.publish(3))
    await asyncio.sleep(0.05)
    bench.replicas[1].restart()
    await asyncio.wait_for(bench.synchronizer.restore(bench.replicas[1]), 10)
    assert bench.served(1) == ["m@v0", "m@v1", "m@v2"]
    bench.replicas[1].ready = True
    await bench.synchronizer.unload_idle({1: 1})
    await asyncio.wait_for(publishing, 10)
    assert bench.served(1) == ["m@v1", "m@v2", "m@v3"]


async def test_a_publish_that_waits_for_a_slot_is_cancelled_at_once_though_a_server_is_being_restored(
    local_store: Store, tmp_path: Path
) -> None:
    limits = replace(LIMITS, room_s=60, load_s=60, attempt_s=60)
    bench = Bench(local_store, tmp_path / "adapters", [FakeReplica("m-0"), FakeReplica("m-1")], limits=limits)
    await fill_up(bench)
    publishing = asyncio.create_task(bench.publish(3))
    await asyncio.sleep(0.05)
    bench.replicas[1].restart()
    bench.replicas[1].client.load_s = 60
    restoring = asyncio.create_task(bench.synchronizer.restore(bench.replicas[1]))
    await asyncio.sleep(0.05)
    publishing.cancel()
    await asyncio.wait({publishing}, timeout=10)
    assert publishing.cancelled()
    restoring.cancel()
    await asyncio.gather(restoring, return_exceptions=True)


async def test_a_publish_without_a_slot_gives_up_and_evicts_nothing_in_flight(bench: Bench) -> None:
    await fill_up(bench)
    with pytest.raises(PublishError, match=r"m@v3: waiting for older versions to leave took longer than"):
        await bench.publish(3)
    assert bench.served() == ["m@v0", "m@v1", "m@v2"]
    assert bench.versions.published == 2


async def test_a_server_that_does_not_answer_an_unload_stops_nobody(bench: Bench) -> None:
    await bench.publish(0)
    await bench.publish(1)
    bench.replicas[0].client.down = True
    await bench.synchronizer.unload_idle({})
    assert bench.versions.live == [1]
    assert bench.served(1) == ["m@v1"]
