"""Prefect being slow or away is noticed and survived."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tasks import reporting
from tasks.reporting import announce, tell


async def test_an_answer_comes_through() -> None:
    assert await tell("it", asyncio.sleep(0, result=7)) == 7


async def test_a_call_that_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await tell("the progress", asyncio.sleep(60), limit_s=0.02) is None
    assert "did not take the progress within" in caplog.text


async def test_a_call_that_fails_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ConnectionError("refused")

    assert await tell("the table", fail()) is None
    assert "ConnectionError: refused" in caplog.text


async def test_cancelling_is_never_swallowed() -> None:
    telling = asyncio.create_task(tell("it", asyncio.sleep(60)))
    await asyncio.sleep(0)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling


async def test_a_cancel_that_comes_with_the_answer_is_not_lost() -> None:
    answered = asyncio.get_running_loop().create_future()

    async def ask() -> int:
        return await answered

    telling = asyncio.create_task(tell("it", ask()))
    await asyncio.sleep(0.01)
    answered.set_result(7)
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling


def test_an_event_that_is_refused_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no events worker")

    monkeypatch.setattr(reporting, "emit_event", refuse)
    announce("version.published", model_id="a", run_id="r", version=1)
    assert "version.published of a: no events worker" in caplog.text


def test_an_event_names_model_run_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(reporting, "emit_event", lambda event, **kwargs: sent.append((event, kwargs)))
    announce("checkpoint.saved", model_id="a", run_id="r", config="shop", step=5)
    event, content = sent[0]
    assert event == "checkpoint.saved"
    assert content["payload"] == {"step": 5}
    assert content["resource"] == {
        "prefect.resource.id": "repertory.model.a",
        "prefect.resource.name": "a",
        "repertory.run-id": "r",
        "repertory.config": "shop",
    }
