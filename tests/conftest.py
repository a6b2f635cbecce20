"""Fixtures of all tests. Builders of records are plain functions in tests/fakes.py."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_runtime.config import StoreConfig
from model_runtime.store import Store, open_store
from model_runtime.types import Trajectory
from tests import fakes

S3_BUCKET = "repertory-tests"
REAL_S3_ENV = "REPERTORY_TEST_S3_ENV"


@pytest.fixture
def make_trajectory() -> Callable[..., Trajectory]:
    """`fakes.make_trajectory`, for tests that prefer a fixture."""
    return fakes.make_trajectory


@pytest.fixture
def local_store(tmp_path: Path) -> Store:
    return open_store(StoreConfig(url=str(tmp_path / "store")))


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """A moto server over HTTP on loopback, with the bucket `S3_BUCKET`. It checks no credentials."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    fakes.create_bucket(url, S3_BUCKET)
    yield url
    server.stop()


@pytest.fixture
def s3_store_config(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    """A prefix of its own in the moto server; the environment points at it."""
    fakes.use_s3(monkeypatch, moto_endpoint)
    return StoreConfig(url=f"s3://{S3_BUCKET}/{uuid.uuid4().hex}")


@pytest.fixture
def real_s3_env_file() -> Path:
    """The env file named by REPERTORY_TEST_S3_ENV; skips the test where there is none."""
    env_file = os.environ.get(REAL_S3_ENV)
    if not env_file:
        pytest.skip(f"no real S3 endpoint: {REAL_S3_ENV} names no env file")
    return Path(env_file)


@pytest.fixture
def real_s3_store_config(real_s3_env_file: Path, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    """A prefix of its own on a real S3 endpoint, as the env file says."""
    values = fakes.read_env_file(real_s3_env_file)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return StoreConfig(url=f"s3://{values['S3_TEST_BUCKET']}/{uuid.uuid4().hex}")
