"""Random conversations, branching, edited, streamed, parallel, with tools and failures: every sampled token
is in exactly one trajectory or accounted for, and a chain is what the server was given and gave."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from model_runtime.config import StoreConfig
from model_runtime.store import open_store
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway
from tests.tool_use import SEARCH, calling, result, user
from tests.tool_use import call as tool_call
from tests.unit.gateway.test_rollback import counters
from tests.unit.gateway.test_tools import COMPACT_CALL, SAMPLED_CALL, prepare, tool_config

ANSWERS = ["hello", "naïve 🙂", SAMPLED_CALL, COMPACT_CALL, "  spaces\n", "a longer answer than most"]

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "go on", "edit", "anew", "repeat", "parallel", "fail"]),
        st.integers(0, 5),  # which conversation, counted from the newest
        st.integers(0, len(ANSWERS) - 1),
        st.booleans(),  # streamed
    ),
    min_size=1,
    max_size=9,
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("properties"))))
    with live_gateway(store, config=tool_config()) as harness:
        yield prepare(harness)


class Agent:
    """Keeps every conversation it ever had, and may take up any of them."""

    def __init__(self, harness: GatewayHarness, session: LiveSession) -> None:
        self.harness, self.session = harness, session
        self.histories: list[list[dict[str, Any]]] = []
        self.num_calls = 0

    def step(self, kind: str, which: int, answer: int, streamed: bool) -> None:
        self.harness.server.answers = [ANSWERS[answer]]
        self.harness.server._num_answers = 0
        messages = self._messages(kind, which)
        if kind == "fail":
            self.harness.server.fail_next = [400]
            assert self._ask(messages, streamed).status_code == 400
            return
        if kind == "parallel":
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(lambda _: self._ask(messages, streamed), range(2)))
        else:
            answers = [self._ask(messages, streamed)]
        for response in answers:
            assert response.status_code == 200
            self.histories.append([*messages, self._message_of(response, streamed)])

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

    def _ask(self, messages: list[dict[str, Any]], streamed: bool) -> Any:
        self.num_calls += 1
        headers = {"x-stainless-retry-count": "0"}
        return self.session.chat(messages, tools=[SEARCH], stream=streamed, headers=headers)

    def _message_of(self, response: Any, streamed: bool) -> dict[str, Any]:
        if not streamed:
            return response.json()["choices"][0]["message"]
        lines = response.text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        made = [entry for delta in deltas for entry in delta.get("tool_calls", ())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        if not made:
            return {"role": "assistant", "content": text}
        functions = [entry["function"] for entry in made]
        return calling(
            *(tool_call(f["name"], f["arguments"], "new") for f in functions), content=text or None
        )


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(steps=STEPS)
def test_no_sampled_token_is_lost_or_counted_twice(gateway: GatewayHarness, steps: list[Any]) -> None:
    harness = gateway
    prepare(harness)
    before = counters(harness)
    session = harness.open_session()
    agent = Agent(harness, session)
    for step in steps:
        agent.step(*step)
    rows_answer = session.finalize(1.0)["num_rows"]
    rolled_back = counters(harness)["rolled_back_tokens"] - before["rolled_back_tokens"]
    rows = harness.rows("plan")
    assert rows_answer == ({"plan": len(rows)} if rows else {})
    # What was given to the server, by request; and how much it sampled.
    given = Counter(tuple(request["token_ids"]) for request in harness.server.requests)
    num_recorded, turns = 0, 0
    for row in rows:
        mask = row.response_mask.astype(bool)
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        num_recorded += int(mask.sum())
        assert (row.behavior_logprobs[~mask] == 0).all()
        assert (row.token_versions[mask] == 0).all()
        assert (row.token_versions[~mask] == -1).all()
        for turn in row.turns:
            turns += 1
            count = turn.end - turn.start
            assert mask[turn.start : turn.end].all()
            asked = tuple(ids[: len(row.prompt_ids) + turn.start])
            assert given[asked], "the server was never given this"
            given[asked] -= 1
            assert row.behavior_logprobs[turn.start : turn.end].tolist() == harness.server.logprobs(count)
            text = harness.server.tokenizer.decode(row.response_ids[turn.start : turn.end].tolist())
            assert text in ANSWERS
    assert num_recorded + rolled_back == harness.server.num_sampled
    assert turns <= agent.num_calls
