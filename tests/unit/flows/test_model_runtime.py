"""One model's life, on a runtime that only says which versions come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prefect import task
from prefect.client.schemas.objects import State

from flows import model_runtime as module
from flows.model_runtime import live
from model_runtime.config import RunConfig
from model_runtime.errors import SupersededError, TrainerError
from tasks.narrator import Narrator

CONFIG = RunConfig.model_validate(
    {
        "multi_model": {"models": [{"model_id": "a", "model_path": "/a"}]},
        "agent_model_mapping": {"x": "a"},
    }
)


class FakeRuntime:
    """Commits versions 0, 1, … `last`; a checkpoint at every second one."""

    model_id, run_id = "a", "run-1"
    trainer_status = stop_reason = None
    incarnation = 1
    config = CONFIG

    def __init__(self, last: int = 3, fails_at: int | None = None) -> None:
        self.log: list[str] = []
        self.published_version: int | None = None
        self.checkpoint_step: int | None = None
        self._last, self._fails_at = last, fails_at

    async def start_rollout_servers(self) -> None:
        self.log.append("server")

    async def start_trainer(self) -> None:
        self.log.append("trainer")

    async def next_version(self) -> int | None:
        coming = 0 if self.published_version is None else self.published_version + 1
        if coming == self._fails_at:
            raise TrainerError("the trainer died")
        self.checkpoint_step = coming // 2 * 2 or None
        return coming if coming <= self._last else None

    async def until_servable(self) -> None:
        pass

    async def publish(self, version: int, **columns: object) -> None:
        self.published_version = version
        self.log.append(f"v{version}")

    async def serve_until_stopped(self) -> str:
        self.log.append("serve")
        return "the run is over"

    async def close(self) -> None:
        self.log.append("closed")


@pytest.fixture(autouse=True)
def story(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tasks called as plain functions, and what Prefect would have been told."""
    told: list[str] = []
    for name in ("start_server", "start_trainer", "first_version", "serve"):
        monkeypatch.setattr(module, name, getattr(module, name).fn)

    run = Narrator.run

    async def narrated(self: Narrator, task: Any, *args: Any) -> Any:
        outcome = await run(self, task, *args)
        if isinstance(outcome, State):
            told.append(f"{outcome.name}: {outcome.message}")
        return outcome

    monkeypatch.setattr(Narrator, "run", narrated)

    @task(name="checkpoint")
    async def checkpoint(store: Any, layout: Any, model_id: str, step: int) -> None:
        told.append(f"checkpoint {step}")

    class Reporter:
        def __init__(self, *args: Any) -> None:
            pass

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def finish(self) -> None:
            told.append("finished")

    monkeypatch.setattr(module, "record_checkpoint", checkpoint)
    monkeypatch.setattr(module, "ModelReporter", Reporter)
    monkeypatch.setattr(
        module, "announce", lambda event, **content: told.append(f"{event} {content['model_id']}")
    )
    monkeypatch.setattr("tasks.alerts.announce", lambda event, **content: None)
    monkeypatch.setattr(
        "tasks.publish.announce", lambda event, **content: told.append(f"v{content['version']}")
    )
    return told


async def test_each_version_is_published_in_turn_then_the_last_one_is_served(story: list[str]) -> None:
    runtime = FakeRuntime(last=3)
    assert await live(runtime, CONFIG) == "the run is over"  # type: ignore[arg-type]
    assert runtime.log == ["server", "trainer", "v0", "v1", "v2", "v3", "serve", "closed"]
    last = ["checkpoint 4", "No more versions: this model is not trained"]
    assert sorted(story[-3:-1]) == sorted(last)
    assert story[:-3] + story[-1:] == ["v0", "v1", "checkpoint 2", "v2", "v3", "finished"]


async def test_a_failure_is_announced_and_closes_the_runtime(story: list[str]) -> None:
    runtime = FakeRuntime(fails_at=2)
    with pytest.raises(TrainerError):
        await live(runtime, CONFIG)  # type: ignore[arg-type]
    assert runtime.log[-1] == "closed"
    assert "model.failed a" in story
    assert "finished" not in story


async def test_a_model_with_a_newer_life_ends_with_the_reason_and_has_not_failed(story: list[str]) -> None:
    runtime = FakeRuntime()

    async def superseded(version: int, **columns: object) -> None:
        raise SupersededError("epoch 2 leads")

    runtime.publish = superseded  # type: ignore[method-assign]
    assert await live(runtime, CONFIG) == "the run is over"  # type: ignore[arg-type]
    assert runtime.log == ["server", "trainer", "serve", "closed"]
    assert story == ["finished"]


async def test_a_cancelled_model_closes_its_runtime_and_announces_nothing(story: list[str]) -> None:
    runtime = FakeRuntime()

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    runtime.serve_until_stopped = never  # type: ignore[method-assign]
    living = asyncio.create_task(live(runtime, CONFIG))  # type: ignore[arg-type]
    await asyncio.sleep(0.2)
    living.cancel()
    with pytest.raises(asyncio.CancelledError):
        await living
    assert runtime.log[-1] == "closed"
    assert not any(word.startswith(("model.failed", "finished")) for word in story)
