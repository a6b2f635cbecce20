"""The gateway's control API from the parent's side."""

from __future__ import annotations

import httpx
import pytest

from model_runtime.errors import BackendUnavailableError
from tasks.gateway_admin import GatewayAdmin
from tests.fakes import make_gateway_status

STATUS = make_gateway_status(run_id="r", open_groups=2, open_sessions=3)


def admin(handler: object) -> GatewayAdmin:
    return GatewayAdmin("http://gateway", key="k" * 20, transport=httpx.MockTransport(handler))  # type: ignore[arg-type]


async def test_status_is_asked_with_the_key() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer " + "k" * 20
        return httpx.Response(200, text=STATUS.model_dump_json())

    assert await admin(answer).status() == STATUS


@pytest.mark.parametrize("answer", [httpx.Response(503), httpx.Response(200, text="<html>")])
async def test_an_answer_that_is_no_status_is_none(answer: httpx.Response) -> None:
    assert await admin(lambda request: answer).status() is None


async def test_another_run_s_gateway_at_the_address_is_not_taken_for_the_run_s_own() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=STATUS.model_dump_json()))

    def of(run_id: str) -> GatewayAdmin:
        return GatewayAdmin("http://gateway", key="k" * 20, run_id=run_id, transport=transport)

    assert await of("r").status() == STATUS
    assert await of("another").status() is None


async def test_a_gateway_that_is_away_is_not_healthy() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    away = admin(refuse)
    assert not await away.healthy()
    assert await away.status() is None


async def test_a_wish_is_repeated_until_it_is_taken() -> None:
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.content)
        return httpx.Response(200 if len(bodies) == 2 else 503)

    await admin(answer).want("drain", reason="done")
    assert len(bodies) == 2
    assert b'"drain"' in bodies[1]


async def test_a_wish_nobody_takes_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match="did not take 'stop' within 0 s"):
        await admin(lambda request: httpx.Response(503)).want("stop", limit_s=0.01)
