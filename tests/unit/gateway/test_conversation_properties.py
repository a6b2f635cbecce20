"""Random conversations, branching, edited, streamed, parallel, of several choices, with tools, thoughts,
retries, failures, cancels, streams that break off and versions that take over half an answer: every sampled
token is in exactly one trajectory or accounted for, and a chain is what the server was given and gave."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from model_runtime.config import StoreConfig
from model_runtime.layout import served_name
from model_runtime.store import open_store
from model_runtime.types import Trajectory
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway
from tests.tool_gateway import COMPACT_CALL, SAMPLED_CALL, prepare, tool_config
from tests.tool_use import SEARCH, calling, result, user
from tests.tool_use import call as tool_call
from tests.waiting import until

ANSWERS = [
    "hello",
    "naïve 🙂",
    SAMPLED_CALL,
    COMPACT_CALL,
    "  spaces\n",
    "a longer answer than most",
    f"<think>\nwhy\n</think>\n\n{SAMPLED_CALL}",
    "<think>so</think>well",
    "Action STOP and more",
]
KINDS = [
    "edit",
    "anew",
    "repeat",
    "parallel",
    "choices",
    "retry",
    "refused",
    "aborted",
    "cut",
    "fail",
    "cancel",
    "flip",
    "flip under way",
]
BREAKS = ["drop", "error", "end", "abort"]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on"] * 4 + KINDS),
        st.integers(0, 5),  # which conversation, counted from the newest
        st.integers(0, len(ANSWERS) - 1),
        st.booleans(),  # streamed
        st.booleans(),  # the agent leaves reasoning out
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("properties"))))
    with live_gateway(store, config=tool_config(reasoning_parser="qwen3", partial_rollout=True)) as harness:
        yield prepare(harness)


class Agent:
    """Keeps every conversation it ever had, and may take up any of them."""

    def __init__(self, harness: GatewayHarness, session: LiveSession) -> None:
        self.harness, self.session = harness, session
        self.histories: list[list[dict[str, Any]]] = []
        self.num_answers = 0  # that a client was given whole
        self.num_failures = 0
        self.uncertain: set[str] = set()  # requests of which the gateway may have heard any number of tokens
        self.version = 0

    def step(self, kind: str, which: int, answer: int, streamed: bool, forgets: bool) -> None:
        server = self.harness.server
        server.answers, server._num_answers = [ANSWERS[answer]], 0
        server.token_delay_s, server.break_after, server.hold_after = 0.0, -1, -1
        server.fail_next, server.fail_after_break = [], ()
        messages = self._messages(kind, which)
        fields: dict[str, Any] = {"tools": [SEARCH], "stream": streamed, "stop": ["STOP"]}
        match kind:
            case "refused":
                server.fail_next = [400]
                assert self._ask(messages, fields).status_code == 400
            case "cancel":
                self._hang_up(messages, fields)
            case "cut":
                server.break_after, server.break_by = 1, BREAKS[which % len(BREAKS)]
                self._keep(messages, [self._ask(messages, fields | {"stream": True})], True, forgets)
            case "fail":
                self._fail(messages, fields)
            case "flip under way":
                with ThreadPoolExecutor(1) as pool:
                    num_asked, server.hold_after = len(server.requests), 1
                    asking = pool.submit(self._ask, messages, fields)
                    until(lambda: len(server.requests) > num_asked, "the server was not asked")
                    self._publish()
                    self._keep(messages, [asking.result(20)], streamed, forgets)
            case "parallel":
                with ThreadPoolExecutor(2) as pool:
                    answers = list(pool.map(lambda _: self._ask(messages, fields), range(2)))
                self._keep(messages, answers, streamed, forgets)
            case "choices":
                self._keep(messages, [self._ask(messages, fields | {"n": 2})], streamed, forgets)
            case "retry":
                first = self._ask(messages, fields)
                again = self._ask(messages, fields, fresh=False)
                assert again.text == first.text or streamed
                assert again.headers["x-request-id"] == first.headers["x-request-id"]
                self._keep(messages, [first], streamed, forgets)
            case _:
                if kind == "flip":
                    self._publish()
                if kind == "aborted":
                    server.fail_next = ["abort"]
                self._keep(messages, [self._ask(messages, fields)], streamed, forgets)

    def _publish(self) -> None:
        self.version += 1
        self.harness.renew("plan", published_version=self.version, live_versions=[self.version])

    def _keep(self, messages: list[Any], answers: list[Any], streamed: bool, forgets: bool) -> None:
        for response in answers:
            assert response.status_code == 200, response.text
            for message in messages_of(response, streamed):
                self.num_answers += 1
                if forgets:
                    message.pop("reasoning_content", None)
                self.histories.append([*messages, message])

    def _messages(self, kind: str, which: int) -> list[dict[str, Any]]:
        if kind == "anew" or not self.histories:
            return [user(f"question {which}")]
        history = self.histories[-1 - which % len(self.histories)]
        if kind == "repeat":
            return history[:-1]
        if kind == "edit":
            history = [*history[:-1], {"role": "assistant", "content": f"in other words {which}"}]
        calls = history[-1].get("tool_calls")
        return [*history, result("tea", calls[0]["id"]) if calls else user("go on")]

    def _ask(self, messages: list[Any], fields: dict[str, Any], *, fresh: bool = True) -> Any:
        headers = {"x-stainless-retry-count": "0"} if fresh else {}
        return self.session.chat(messages, headers=headers, **fields)

    def _fail(self, messages: list[Any], fields: dict[str, Any]) -> None:
        """The stream breaks off, and no server goes on with it in time."""
        server, router = self.harness.server, self.harness.gateway.router
        known = {request["request_id"] for request in server.requests}
        server.break_after, server.break_by, server.fail_after_break = 1, "drop", [500] * 9
        timeout_s, router._timeout_s = router._timeout_s, 0.3
        try:
            self._ask(messages, fields | {"stream": True})
        finally:
            router._timeout_s = timeout_s
        self.num_failures += 1
        self.uncertain |= {request["request_id"] for request in server.requests} - known

    def _hang_up(self, messages: list[Any], fields: dict[str, Any]) -> None:
        """Begin to listen, and leave."""
        server = self.harness.server
        server.token_delay_s = 0.02
        known = {request["request_id"] for request in server.requests}
        body = {"messages": messages, "model": "m", **fields, "stream": True}
        headers = self.session.headers | {"x-stainless-retry-count": "0"}
        with (
            httpx.Client(base_url=self.session.base_url, headers=headers) as http,
            http.stream("POST", "agents/planner/v1/chat/completions", json=body) as response,
        ):
            next(response.iter_lines())
        live = self.harness.gateway.sessions._sessions[self.session.session_id]
        until(lambda: not live.calls.num_running, "the call did not end")
        self.uncertain |= {request["request_id"] for request in server.requests} - known


def messages_of(response: Any, streamed: bool) -> list[dict[str, Any]]:
    if not streamed:
        return [choice["message"] for choice in response.json()["choices"]]
    lines = response.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    count = 1 + max(choice["index"] for choice in choices)
    return [joined([c["delta"] for c in choices if c["index"] == index]) for index in range(count)]


def joined(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    made = [entry["function"] for delta in deltas for entry in delta.get("tool_calls", ())]
    text = "".join(delta.get("content") or "" for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if made:
        message = calling(*(tool_call(f["name"], f["arguments"], "new") for f in made), content=text or None)
    reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def count(harness: GatewayHarness, *names: str) -> float:
    """Of all samples of these counters that are of the model `plan`."""
    lines = harness.http.get("/metrics").text.splitlines()
    prefixes = tuple(f"repertory_gateway_{name}_total{{" for name in names)
    found = [line for line in lines if line.startswith(prefixes) and 'model="plan"' in line]
    return sum(float(line.split()[-1]) for line in found)


def check_row(harness: GatewayHarness, row: Trajectory) -> int:
    """The row is what the server was given and gave, turn by turn. Returns its sampled tokens."""
    server = harness.server
    mask = row.response_mask.astype(bool)
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    asked = {request["request_id"]: request for request in server.requests}
    assert (row.behavior_logprobs[~mask] == 0).all()
    assert (row.token_versions[~mask] == -1).all()
    covered = 0
    for turn in row.turns:
        attempts = [name for name in asked if name.startswith(f"{turn.request_id}-")]
        attempts.sort(key=lambda name: int(name.rpartition("-")[2]))
        at, versions = turn.start, set()
        for name, following in zip(attempts, [*attempts[1:], None], strict=True):
            request = asked[name]
            if following is None:
                end = turn.end
            else:  # what the next attempt was given, was kept of this one
                end = at + len(asked[following]["token_ids"]) - len(request["token_ids"])
            assert request["token_ids"] == ids[: len(row.prompt_ids) + at]
            assert turn.temperature == request["sampling_params"]["temperature"]
            piece = slice(at, end)
            assert server.gave[name][: end - at] == row.response_ids[piece].tolist()
            assert row.behavior_logprobs[piece].tolist() == server.logprobs(end - at)
            assert mask[piece].all()
            for version in set(row.token_versions[piece].tolist()):
                assert request["model"] == served_name("plan", version)
                versions.add(version)
            at = end
        last = server.gave[attempts[-1]]
        assert last == row.response_ids[turn.end - len(last) : turn.end].tolist()
        assert (turn.version_min, turn.version_max) == (min(versions), max(versions))
        covered += turn.end - turn.start
    assert covered == int(mask.sum())
    return covered


@hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(steps=STEPS)
def test_no_sampled_token_is_lost_or_counted_twice(gateway: GatewayHarness, steps: list[Any]) -> None:
    harness = gateway
    prepare(harness)
    accounts = ("rolled_back_tokens", "discarded_tokens")
    before = count(harness, *accounts)
    session = harness.open_session()
    agent = Agent(harness, session)
    for step in steps:
        agent.step(*step)
    ended = session.finalize(1.0)
    accounted = count(harness, *accounts) - before
    rows = harness.rows("plan")
    # An agent that was answered with a failure leaves no rows: its tokens are accounted for all the same.
    assert ended["status"] == ("infra" if agent.num_failures else "finalized")
    assert ended["num_rows"] == ({"plan": len(rows)} if rows else {})
    assert len({row.trajectory_id for row in rows}) == len(rows)
    turns = [turn.request_id for row in rows for turn in row.turns]
    assert len(set(turns)) == len(turns)
    num_recorded = sum(check_row(harness, row) for row in rows)
    gave = harness.server.gave
    num_certain = sum(len(ids) for name, ids in gave.items() if name not in agent.uncertain)
    num_all = sum(len(ids) for ids in gave.values())
    assert num_certain <= num_recorded + accounted <= num_all
    if not agent.num_failures and not agent.uncertain:
        assert len(turns) <= agent.num_answers
