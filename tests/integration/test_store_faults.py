"""The store, the log, checkpoints and adapters against a real S3 endpoint behind a proxy that breaks what
passes; against moto where no real one is configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.ingestor import FinishedExecution, TrajectoryIngestor
from model_runtime.adapters import fetch_version, write_version
from model_runtime.checkpoints import STATE_FILE, TrainingState, load_latest_checkpoint, save_checkpoint
from model_runtime.config import GatewayConfig, StoreConfig
from model_runtime.errors import ObjectExistsError, StoreUnavailableError
from model_runtime.layout import RunLayout, writer_id
from model_runtime.log_reader import LogReader
from model_runtime.patient_store import PatientStore
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.store import Store, open_store
from model_runtime.trainer import run_trainer
from model_runtime.training_queue import QueueProgress
from model_runtime.workspace import HOME_ENV
from tests import fakes
from tests.fake_servers import make_adapter_files
from tests.faulty_proxy import FaultyProxy
from tests.gateway_harness import make_config
from tests.tiny_models import make_model
from tests.training_log import TrainingFolder, make_groups, outcome
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RUN = RunLayout("run")
LAYOUT = RUN.model("solver_model")
NOTHING_READ = QueueProgress(low_water={}, consumed=[], closed_groups=[], totals={}, replay=[])


@pytest.fixture(
    params=["s3_store_config", pytest.param("real_s3_store_config", marks=pytest.mark.real_s3)],
    ids=["moto", "real"],
)
def behind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultyProxy, str]]:
    """The proxy and the URL of a store behind it."""
    config: StoreConfig = request.getfixturevalue(request.param)
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], seed=7) as proxy:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(name, proxy.url)
        yield proxy, config.url


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "model")


def store_at(url: str, **limits: float) -> Store:
    settings = {"connect_timeout_s": 1.0, "read_timeout_s": 1.0, "operation_timeout_s": 4.0} | limits
    return open_store(StoreConfig.model_validate({"url": url} | settings))


def patient(store: Store, max_outage_s: float = 60.0) -> PatientStore:
    return PatientStore(store, max_outage_s=max_outage_s)


def meanwhile(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_tenth_of_refused_cut_and_lost_answers_neither_loses_nor_doubles_an_object(
    behind: tuple[FaultyProxy, str],
) -> None:
    proxy, url = behind
    store = patient(store_at(url, max_attempts=2))
    proxy.refuse_share = proxy.cut_share = proxy.lose_share = 0.1
    for number in range(20):
        store.put_if_absent(f"log/{number:03d}", b"%d" % number * 2000)
        with pytest.raises(ObjectExistsError):
            store.put_if_absent(f"log/{number:03d}", b"other")
    assert store.list("log") == [f"log/{number:03d}" for number in range(20)]
    assert [store.get(f"log/{number:03d}") for number in range(20)] == [b"%d" % n * 2000 for n in range(20)]
    assert proxy.num_broken > 5


@pytest.mark.parametrize("how", ["down", "silent", "refuse everything"])
def test_an_outage_is_outlasted(behind: tuple[FaultyProxy, str], how: str) -> None:
    proxy, url = behind
    waits = threading.Event()
    store = PatientStore(store_at(url, max_attempts=1), max_outage_s=60, waiting=lambda _: waits.set())
    store.put("before", b"1")
    if how == "down":
        proxy.down()
    elif how == "silent":
        proxy.silent = True
    else:
        proxy.refuse_share = 1.0
    writing = meanwhile(lambda: store.put_if_absent("meanwhile", b"2" * 100_000))
    assert waits.wait(30)
    proxy.heal()
    if how == "down":
        proxy.up()
    writing.join(60)
    assert store.get("meanwhile") == b"2" * 100_000
    assert store.list("") == ["before", "meanwhile"]


def test_one_operation_takes_no_longer_than_its_limit_on_a_silent_endpoint(
    behind: tuple[FaultyProxy, str],
) -> None:
    proxy, url = behind
    patient(store_at(url)).put("a", b"1")
    store = store_at(url, read_timeout_s=30.0, operation_timeout_s=1.0)
    proxy.silent = True
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"get s3://.*/a: not done within 1 s"):
        store.get("a")
    assert time.monotonic() - began < 20


def test_a_slow_line_gives_large_objects_the_time_they_need(behind: tuple[FaultyProxy, str]) -> None:
    proxy, url = behind
    store = store_at(url, read_timeout_s=20.0, operation_timeout_s=20.0)
    proxy.bytes_per_s = 1e6
    data = bytes(range(256)) * 4 * 2**10
    store.put("adapter", data)
    assert store.get("adapter") == data


async def test_the_log_gets_every_execution_once_through_an_outage(behind: tuple[FaultyProxy, str]) -> None:
    proxy, url = behind
    ingestor = TrajectoryIngestor(
        store_at(url, max_attempts=1),
        RUN,
        writer=writer_id(1, 1),
        trainable_models=["solver_model"],
        config=GatewayConfig(commit_interval_s=0.01),
    )
    await ingestor.start()
    proxy.refuse_share, proxy.lose_share = 0.1, 0.1
    for number in range(10):
        row = fakes.make_trajectory(reward=1.0, group_id=f"g{number}", model_id="solver_model")
        done = FinishedExecution(
            member=row.member,
            status="finalized",
            reason="",
            train={"solver_model": True},
            trajectories=(row,),
        )
        await ingestor.ingest(done)
    proxy.heal()
    await ingestor.close()
    shards = list(LogReader(store_at(url), LAYOUT).new_shards())
    groups = [row.member.group_id for _, shard in shards for row in shard.trajectories]
    assert sorted(groups) == [f"g{number}" for number in range(10)]
    assert proxy.num_broken > 0


@pytest.mark.parametrize("how", ["down", "a third refused", "half of the answers cut"])
def test_a_trainer_behind_a_broken_store_ends_with_the_bytes_of_an_undisturbed_one(
    behind: tuple[FaultyProxy, str], tmp_path: Path, base: Path, how: str
) -> None:
    proxy, url = behind
    undisturbed = a_training(tmp_path / "undisturbed", base, url=str(tmp_path / "undisturbed" / "store"))
    assert run_trainer(undisturbed.spec, stop=threading.Event()) == 0

    folder = a_training(tmp_path / "disturbed", base, url=url)
    codes: list[int] = []
    training = meanwhile(lambda: codes.append(run_trainer(folder.spec, stop=threading.Event())))
    until(lambda: (status := folder.status()) is not None and status.step >= 1, limit_s=120)
    if how == "down":
        proxy.down()
        time.sleep(5)
        proxy.up()
    elif how == "a third refused":
        proxy.refuse_share = 0.33
    else:
        proxy.cut_share = 0.5
    training.join(200)
    proxy.heal()
    assert codes == [0]
    assert trained(folder) == trained(undisturbed)


def trained(folder: TrainingFolder) -> dict[str, Any]:
    """What a run leaves, but for the state of Python's own generator: pauses between retries are drawn from
    it, and nothing in training is."""
    left = outcome(folder)
    files = {name: sha for name, sha in left["checkpoint"]["files"].items() if name != STATE_FILE}
    return left | {"checkpoint": left["checkpoint"] | {"files": files}}


def a_training(root: Path, base: Path, *, url: str) -> TrainingFolder:
    root.mkdir()
    store = {"url": url, "connect_timeout_s": 1.0, "read_timeout_s": 5.0, "max_attempts": 2}
    folder = TrainingFolder(root, base, run={"store": store})
    folder.write_groups(make_groups(10))
    folder.tell(desired="drain", published_version=1000)
    return folder


def test_a_checkpoint_written_through_faults_is_whole(behind: tuple[FaultyProxy, str]) -> None:
    proxy, url = behind
    store = patient(store_at(url, max_attempts=2))
    weights = {"a": np.arange(50_000, dtype=np.float32)}
    state = TrainingState(adapter=weights, optimizer=weights, generators={}, values={"step": 3})
    proxy.refuse_share, proxy.cut_share = 0.2, 0.2
    save_checkpoint(store, LAYOUT, state, step=3, epoch=1, version=0, seed=0, progress=NOTHING_READ)
    loaded = load_latest_checkpoint(store, LAYOUT)
    assert loaded is not None
    assert loaded.document.step == 3
    assert np.array_equal(loaded.state.optimizer["a"], weights["a"])


def test_a_version_written_through_faults_is_whole(behind: tuple[FaultyProxy, str]) -> None:
    proxy, url = behind
    store = patient(store_at(url, max_attempts=2))
    files = make_adapter_files(1)
    proxy.refuse_share, proxy.cut_share, proxy.lose_share = 0.2, 0.2, 0.1
    write_version(store, LAYOUT, files, version=0, step=0, epoch=1)
    _, fetched = fetch_version(store, LAYOUT, 0)
    assert fetched == files


def test_a_gateway_that_starts_while_its_store_is_away_waits_for_it(
    behind: tuple[FaultyProxy, str], tmp_path: Path
) -> None:
    proxy, url = behind
    config, port = tmp_path / "config.json", free_port()
    config.write_text(json.dumps(make_config().model_dump(mode="json")))
    command = [sys.executable, "-m", "gateway", "--run-id", "run", "--config", str(config)]
    command += ["--store-url", url, "--epoch", "1", "--incarnation", "1", "--port", str(port)]
    environment = os.environ | {ADMIN_KEY_ENV: "k" * 20, HOME_ENV: str(tmp_path)}
    proxy.down()
    with (tmp_path / "log").open("wb") as log:
        gateway = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: "the store is unavailable" in (tmp_path / "log").read_text(), limit_s=120)
        time.sleep(5)
        assert gateway.poll() is None
        proxy.up()
        until(lambda: is_up(f"http://127.0.0.1:{port}/health") or gateway.poll() is not None, limit_s=120)
        assert gateway.poll() is None
    finally:
        gateway.kill()
        gateway.wait()


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
