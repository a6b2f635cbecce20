from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from model_runtime import registrar as module
from model_runtime.config import GatewayConfig
from model_runtime.coordinator import claim_epoch, write_desired
from model_runtime.errors import ConfigError, PublishError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV, ModelRenewal, RenewalAnswer
from model_runtime.registrar import Registrar
from model_runtime.store import Store
from tests.fake_servers import FakeGateway, until

KEY = "admin-key-of-the-test"
LAYOUT = RunLayout("run")


class Model:
    """What a runtime would be: says what renewals say and hears the answers."""

    def __init__(self) -> None:
        self.published: int | None = None
        self.answers: list[tuple[int | None, RenewalAnswer]] = []
        self.orders: list[str] = []

    def compose(self, seq: int) -> ModelRenewal:
        return ModelRenewal(
            model_id="m",
            epoch=1,
            incarnation=0,
            seq=seq,
            kind="trainable",
            status="ready",
            published_version=self.published,
        )

    def hear(self, renewal: ModelRenewal, answer: RenewalAnswer) -> None:
        self.answers.append((renewal.published_version, answer))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, KEY)


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway().serving() as fake:
        yield fake


@asynccontextmanager
async def running(url: str, store: Store, model: Model, **config: Any) -> AsyncIterator[Registrar]:
    settings = {"renew_interval_s": 0.2, "lease_s": 0.3} | config
    registrar = Registrar(
        gateway_url=url,
        model_id="m",
        epoch=1,
        config=GatewayConfig.model_validate(settings),
        store=store,
        layout=LAYOUT,
        compose=model.compose,
        on_answer=model.hear,
        on_orders=lambda: model.orders.append(registrar.desired),
    )
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await registrar.close()


def answering(**fields: Any) -> Callable[[ModelRenewal], RenewalAnswer]:
    return lambda renewal: RenewalAnswer.model_validate({"desired": "run", "epoch": 1} | fields)


async def test_the_lease_is_renewed_with_rising_numbers_under_the_admin_key(
    gateway: FakeGateway, local_store: Store
) -> None:
    async with running(gateway.url, local_store, Model()):
        await until(lambda: len(gateway.renewals) >= 3)
    numbers = [renewal.seq for renewal in gateway.renewals]
    assert numbers == sorted(set(numbers))
    assert set(gateway.authorizations) == {f"Bearer {KEY}"}


def test_without_an_admin_key_nothing_starts(local_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_KEY_ENV)
    with pytest.raises(ConfigError, match=ADMIN_KEY_ENV):
        Registrar(
            gateway_url="http://127.0.0.1:1",
            model_id="m",
            epoch=1,
            config=GatewayConfig(),
            store=local_store,
            layout=LAYOUT,
            compose=Model().compose,
            on_answer=Model().hear,
            on_orders=lambda: None,
        )


async def test_a_change_is_told_at_once_but_not_more_often_than_allowed(
    gateway: FakeGateway, local_store: Store
) -> None:
    async with running(gateway.url, local_store, Model(), renew_interval_s=30) as registrar:
        await until(lambda: gateway.renewals)
        began = time.monotonic()
        registrar.changed()
        await until(lambda: len(gateway.renewals) == 2)
        assert time.monotonic() - began < 1
        for _ in range(50):
            registrar.changed()
            await asyncio.sleep(0.01)
        elapsed = time.monotonic() - began
        assert 3 <= len(gateway.renewals) <= 2 + elapsed / module.MIN_SPACING_S


async def test_a_flip_returns_when_a_renewal_that_publishes_it_is_acknowledged(
    gateway: FakeGateway, local_store: Store
) -> None:
    model = Model()
    async with running(gateway.url, local_store, model, renew_interval_s=30) as registrar:
        await until(lambda: gateway.renewals)
        model.published = 4
        await registrar.flip(4, timeout_s=2)
        assert gateway.last.published_version == 4
        assert model.answers[-1][0] == 4


async def test_a_flip_nobody_acknowledges_fails_and_is_told_again_when_the_gateway_is_back(
    gateway: FakeGateway, local_store: Store
) -> None:
    model = Model()
    gateway.refuse = 503
    async with running(gateway.url, local_store, model) as registrar:
        model.published = 4
        with pytest.raises(PublishError, match=r"m: v4 is not acknowledged .* after 0\.2 s \(.*503"):
            await registrar.flip(4, timeout_s=0.2)
        gateway.refuse = None
        await registrar.flip(4, timeout_s=2)


async def test_the_last_answer_is_kept(gateway: FakeGateway, local_store: Store) -> None:
    gateway.answer = answering(oldest_open_version=2, inflight_versions={2: 7})
    async with running(gateway.url, local_store, Model()) as registrar:
        await until(lambda: registrar.last_answer)
        assert registrar.last_answer is not None
        assert registrar.last_answer.inflight_versions == {2: 7}
        assert registrar.last_answer.oldest_open_version == 2


async def test_drain_is_no_stop(gateway: FakeGateway, local_store: Store) -> None:
    gateway.answer = answering(desired="drain")
    model = Model()
    async with running(gateway.url, local_store, model) as registrar:
        await until(lambda: registrar.desired == "drain")
        assert registrar.stop_reason is None
        await until(lambda: len(gateway.renewals) >= 3)
    assert model.orders == ["drain"]


async def test_stop_is_heard_and_never_taken_back(gateway: FakeGateway, local_store: Store) -> None:
    gateway.answer = answering(desired="stop")
    async with running(gateway.url, local_store, Model()) as registrar:
        assert "asked by the parent" in await asyncio.wait_for(registrar.wait_until_stopped(), 2)
        gateway.answer = answering(desired="run")
        seen = len(gateway.renewals)
        await until(lambda: len(gateway.renewals) > seen + 1)
        assert registrar.desired == "stop"


async def test_a_run_that_is_to_stop_still_gets_its_last_version_acknowledged(
    gateway: FakeGateway, local_store: Store
) -> None:
    model = Model()
    gateway.answer = answering(desired="stop")
    async with running(gateway.url, local_store, model) as registrar:
        await asyncio.wait_for(registrar.wait_until_stopped(), 2)
        model.published = 3
        await registrar.flip(3, timeout_s=2)


@pytest.mark.parametrize("answer", [{"superseded": True}, {"epoch": 2}])
async def test_a_newer_life_stops_this_one_and_no_flip_succeeds(
    gateway: FakeGateway, local_store: Store, answer: dict[str, Any]
) -> None:
    model = Model()
    gateway.answer = answering(**answer)
    async with running(gateway.url, local_store, model) as registrar:
        reason = await asyncio.wait_for(registrar.wait_until_stopped(), 2)
        assert "superseded" in reason
        assert model.answers == []
        model.published = 0
        with pytest.raises(SupersededError, match="superseded"):
            await registrar.flip(0, timeout_s=2)


async def test_a_gateway_that_takes_the_request_and_never_answers_counts_as_silent(
    gateway: FakeGateway, local_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPT_TIMEOUT_S", 0.1)
    gateway.silent = True
    claim_epoch(local_store, LAYOUT)
    write_desired(local_store, LAYOUT, epoch=1, state="stop", reason="ended by the user")
    async with running(gateway.url, local_store, Model()) as registrar:
        reason = await asyncio.wait_for(registrar.wait_until_stopped(), 3)
    assert reason == "asked in the store: ended by the user"


async def test_while_the_gateway_is_silent_a_newer_epoch_in_the_store_stops_this_one(
    local_store: Store,
) -> None:
    claim_epoch(local_store, LAYOUT)
    claim_epoch(local_store, LAYOUT)
    async with running(f"http://127.0.0.1:{free_port()}", local_store, Model()) as registrar:
        assert "epoch 2 leads" in await asyncio.wait_for(registrar.wait_until_stopped(), 3)


async def test_while_the_gateway_is_silent_draining_is_read_from_the_store(local_store: Store) -> None:
    claim_epoch(local_store, LAYOUT)
    write_desired(local_store, LAYOUT, epoch=1, state="drain")
    async with running(f"http://127.0.0.1:{free_port()}", local_store, Model()) as registrar:
        await until(lambda: registrar.desired == "drain")


async def test_what_an_earlier_epoch_wanted_does_not_count(local_store: Store) -> None:
    layout = RunLayout("run")
    claim_epoch(local_store, layout)
    write_desired(local_store, layout, epoch=0, state="stop")
    async with running(f"http://127.0.0.1:{free_port()}", local_store, Model()) as registrar:
        await asyncio.sleep(0.8)
        assert registrar.stop_reason is None


async def test_while_the_gateway_answers_the_store_is_not_asked(
    gateway: FakeGateway, local_store: Store
) -> None:
    claim_epoch(local_store, LAYOUT)
    write_desired(local_store, LAYOUT, epoch=1, state="stop")
    async with running(gateway.url, local_store, Model()) as registrar:
        await asyncio.sleep(0.6)
        assert registrar.stop_reason is None


async def test_a_restarted_gateway_hears_of_the_model_soon(local_store: Store) -> None:
    port = free_port()
    gateway = FakeGateway()
    async with running(f"http://127.0.0.1:{port}", local_store, Model(), renew_interval_s=10, lease_s=60):
        await asyncio.sleep(0.2)
        async with gateway.serving(port):
            await until(lambda: gateway.renewals, timeout_s=2)


async def test_trouble_is_logged_once_and_so_is_its_end(
    gateway: FakeGateway, local_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    gateway.refuse = 500
    async with running(gateway.url, local_store, Model(), lease_s=60):
        await asyncio.sleep(0.8)
        gateway.refuse = None
        await until(lambda: gateway.renewals)
    messages = [record.message for record in caplog.records if record.name == "model_runtime.registrar"]
    assert len(messages) == 2
    assert "500" in messages[0]
    assert KEY not in caplog.text
