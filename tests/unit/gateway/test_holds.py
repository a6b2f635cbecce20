"""Versions held for an evaluation: they answer it, training does not wait for it, and one at a time."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway_harness import RUN_ID, GatewayHarness, live_gateway, make_config

HELD = {"plan": 3, "solve": 5}


def hold(harness: GatewayHarness, name: str = "e1", **body: Any) -> httpx.Response:
    return harness.http.put(f"/admin/evaluations/{name}", json=body, headers=harness.admin)


def release(harness: GatewayHarness, name: str = "e1") -> None:
    harness.http.delete(f"/admin/evaluations/{name}", headers=harness.admin).raise_for_status()


@pytest.fixture
def serving(harness: GatewayHarness) -> GatewayHarness:
    """`plan` publishes version 3, `solve` version 5."""
    harness.renew("plan", published_version=3, live_versions=[2, 3])
    harness.renew("solve", published_version=5, live_versions=[5])
    release(harness)
    return harness


def publish(harness: GatewayHarness, version: int) -> dict[str, Any]:
    return harness.renew("plan", published_version=version, live_versions=[2, 3, version])


def test_the_published_versions_are_held_and_answer_after_newer_ones_are_published(
    serving: GatewayHarness,
) -> None:
    assert hold(serving).json()["versions"] == HELD
    session = serving.open_session(mode="eval", group_id="task-1", versions=HELD)
    publish(serving, 4)
    assert session.chat("hello").status_code == 200
    assert serving.server.requests[-1]["model"] == "plan@v3"
    other = serving.open_session(mode="eval", group_id="task-2")
    other.chat("hello")
    assert serving.server.requests[-1]["model"] == "plan@v4"


def test_the_runtime_hears_of_a_held_version_as_of_one_in_use_until_it_is_released(
    serving: GatewayHarness,
) -> None:
    hold(serving)
    assert publish(serving, 4)["inflight_versions"] == {"3": 1}
    release(serving)
    assert publish(serving, 4)["inflight_versions"] == {}


def test_training_does_not_wait_for_what_an_evaluation_samples(serving: GatewayHarness) -> None:
    hold(serving)
    session = serving.open_session(mode="eval", group_id="task-1", versions=HELD)
    session.chat("hello")
    assert publish(serving, 4)["oldest_open_version"] is None


def test_what_an_evaluation_samples_is_recorded_apart(serving: GatewayHarness) -> None:
    hold(serving)
    session = serving.open_session(mode="eval", group_id="task-apart", versions=HELD)
    session.chat("hello")
    session.finalize(1.0)
    rows = [r for r in serving.rows("plan", evaluation=True) if r.member.group_id == "task-apart"]
    assert [row.policy_version for row in rows] == [3]
    assert serving.rows("plan") == []


def test_versions_of_another_run_are_not_held(serving: GatewayHarness) -> None:
    refused = hold(serving, run_id="another")
    assert refused.status_code == 409
    message = refused.json()["error"]["message"]
    assert message == f"this gateway serves run '{RUN_ID}', not 'another'"
    assert hold(serving, run_id=RUN_ID).json()["versions"] == HELD


def test_one_evaluation_at_a_time(serving: GatewayHarness) -> None:
    hold(serving, "e1")
    refused = hold(serving, "e2")
    assert refused.status_code == 409
    assert "evaluation 'e1' holds versions" in refused.json()["error"]["message"]
    release(serving, "e2")
    assert hold(serving, "e2").status_code == 409, "whoever holds nothing releases nothing"
    release(serving, "e1")
    assert hold(serving, "e2").status_code == 200
    release(serving, "e2")


def test_a_hold_goes_on_with_the_versions_it_began_with(serving: GatewayHarness) -> None:
    hold(serving)
    publish(serving, 4)
    assert hold(serving).json()["versions"] == HELD


def test_a_hold_that_nobody_renews_ends(serving: GatewayHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(serving, ttl_s=30)
    holds, now = serving.gateway.holds, serving.gateway.holds._clock()
    monkeypatch.setattr(holds, "_clock", lambda: now + 31)
    assert holds.versions == {}
    assert serving.ask_for_session(mode="eval", versions=HELD).status_code == 409


def serve_nothing_but(harness: GatewayHarness, version: int) -> None:
    """A new life of `plan`'s runtime serves the newest version alone."""
    harness.renew("plan", published_version=version, live_versions=[version])


def test_whoever_renews_a_hold_hears_that_a_version_has_left_service(serving: GatewayHarness) -> None:
    hold(serving)
    serving.renew("plan", status="starting", published_version=None, live_versions=[])
    assert hold(serving, versions=HELD).json()["versions"] == HELD, "it may come back"
    serve_nothing_but(serving, 4)
    for body in ({"versions": HELD}, {}):
        refused = hold(serving, **body)
        assert refused.status_code == 409
        message = "version 3 of model 'plan' is not in service; live are [4]"
        assert message in refused.json()["error"]["message"]


def test_a_call_of_a_version_that_has_left_service_fails_at_once_and_asks_no_server(
    serving: GatewayHarness,
) -> None:
    hold(serving)
    session = serving.open_session(mode="eval", group_id="task-1", versions=HELD)
    serve_nothing_but(serving, 4)
    answer = session.chat("hello")
    assert answer.status_code == 503
    assert "version 3 of model 'plan'" in answer.json()["error"]["message"]
    assert serving.server.requests == []
    assert session.finalize(1.0)["status"] == "infra", "no answer is no failure of the policy"


def test_a_server_that_does_not_know_a_held_version_goes_on_serving_the_others(
    serving: GatewayHarness,
) -> None:
    hold(serving)
    session = serving.open_session(mode="eval", group_id="task-1", versions=HELD)
    serving.server.fail_next = [404, 404]
    assert session.chat("hello").status_code == 200
    [replica] = serving.gateway.bindings.get("plan").replicas.values()
    assert replica.rests_until == float("-inf")
    serving.server.fail_next = [503]
    assert session.chat("and now").status_code == 200
    assert replica.rests_until > float("-inf"), "what any call would have met"


def test_a_version_that_is_not_in_service_can_t_be_held(serving: GatewayHarness) -> None:
    assert hold(serving, versions={"plan": 2}).json()["versions"] == {"plan": 2, "solve": 5}
    release(serving)
    refused = hold(serving, versions={"plan": 1})
    assert refused.status_code == 409
    assert (
        "version 1 of model 'plan' is not in service; live are [2, 3]" in refused.json()["error"]["message"]
    )


def test_a_session_gets_no_version_but_those_held_and_never_in_training(serving: GatewayHarness) -> None:
    refused = serving.ask_for_session(mode="eval", versions=HELD)
    assert refused.status_code == 409
    assert "version 3 of model 'plan' is not held" in refused.json()["error"]["message"]
    hold(serving)
    assert serving.ask_for_session(mode="train", versions=HELD).status_code == 400


def test_no_model_is_made_to_hold_more_versions_than_its_servers_take(tmp_path: Any) -> None:
    from model_runtime.config import StoreConfig
    from model_runtime.store import open_store

    config = make_config(of_each_model={"rollout": {"max_live_versions": 2}})
    with live_gateway(open_store(StoreConfig(url=str(tmp_path))), config=config) as small:
        small.make_ready()
        refused = hold(small)
    assert refused.status_code == 429
    assert "rollout.max_live_versions is 2, 3 are needed" in refused.json()["error"]["message"]
