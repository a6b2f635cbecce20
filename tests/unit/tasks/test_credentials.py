"""Keys of the store from a Prefect block."""

from __future__ import annotations

import os
from typing import Any

import pytest
from prefect.blocks.system import Secret

from model_runtime.config import StoreConfig
from model_runtime.errors import ConfigError
from tasks.credentials import load_credentials

STORE = StoreConfig(url="s3://bucket/runs", credentials_block="store-keys")


def hold(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    async def aload(name: str) -> Secret[Any]:
        assert name == "store-keys"
        if value is None:
            raise ValueError("Unable to find block document named store-keys for block type secret")
        return Secret(value=value)

    monkeypatch.setattr(Secret, "aload", aload)


async def test_the_keys_are_in_the_environment_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the machine")
    hold(monkeypatch, {"AWS_SECRET_ACCESS_KEY": "of the block"})
    await load_credentials(STORE)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "of the block"


async def test_without_a_block_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, {"AWS_SECRET_ACCESS_KEY": "of the block"})
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the machine")
    await load_credentials(StoreConfig(url="s3://bucket/runs"))
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "of the machine"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "no Secret block 'store-keys' is on the Prefect server"),
        ("hunter2", "it holds a str"),
        ({"PATH": "hunter2"}, r"it holds the names \['PATH'\]"),
        ({"AWS_REGION": 7}, r"it holds the names \['AWS_REGION'\]"),
        ({}, "it holds a dict"),
    ],
)
async def test_another_block_is_refused_without_its_value(
    monkeypatch: pytest.MonkeyPatch, value: Any, message: str
) -> None:
    hold(monkeypatch, value)
    with pytest.raises(ConfigError, match=message) as refused:
        await load_credentials(STORE)
    assert "hunter2" not in str(refused.value)
