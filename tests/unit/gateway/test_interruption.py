"""Weights that change while an answer is sampled: it goes on under the new version as one answer, one budget,
one record of which version sampled what. Over HTTP, before a server that ends requests as vLLM does."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from gateway.chains import VersionSpan
from gateway.interruption import Pieces
from model_runtime.config import StoreConfig
from model_runtime.llm_client import Generation
from model_runtime.store import Store, open_store
from tests.fake_generation import until_stop
from tests.gateway_harness import GatewayHarness, LiveSession, live_gateway, make_config
from tests.tool_use import SEARCH
from tests.waiting import until

PARTIAL = {"async_training": {"partial_rollout": True}}
LONG = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def partial_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayHarness]:
    store = open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store"))))
    with live_gateway(store, config=make_config(of_each_model=PARTIAL)) as harness:
        yield harness


@pytest.fixture
def harness(partial_gateway: GatewayHarness) -> GatewayHarness:
    partial_gateway.start_afresh()
    partial_gateway.server.answers = [LONG, " more"]
    partial_gateway.server.token_delay_s = 0.015
    return partial_gateway


def asked_and_flipped(
    harness: GatewayHarness,
    ask: Callable[[], Any],
    *,
    after_s: float = 0.12,
    versions: tuple[int, ...] = (1,),
) -> Any:
    """The answer to `ask`, while `versions` are published one after another."""
    with ThreadPoolExecutor(1) as pool:
        answer: Future[Any] = pool.submit(ask)
        for number, version in enumerate(versions, start=1):
            until(lambda number=number: len(harness.server.requests) >= number, "the server was not asked")
            time.sleep(after_s)
            harness.renew("plan", published_version=version)
        return answer.result(10)


def spans(row: Any) -> list[tuple[int, int]]:
    """(version, tokens) of the sampled tokens, in their order."""
    versions = row.token_versions[row.response_mask == 1]
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[a]), b - a) for a, b in itertools.pairwise(edges)]


def test_a_running_generation_goes_on_under_the_new_version_as_one_answer(harness: GatewayHarness) -> None:
    session, server = harness.open_session(), harness.server
    answer = asked_and_flipped(harness, lambda: session.chat("x", max_tokens=60)).json()
    first, second = server.requests
    kept = len(second["token_ids"]) - len(first["token_ids"])
    assert 0 < kept < len(server.answer_ids(LONG))
    assert (first["model"], second["model"]) == ("plan@v0", "plan@v1")
    assert second["token_ids"] == first["token_ids"] + server.answer_ids(LONG)[:kept]
    assert first["sampling_params"]["max_tokens"] == 60
    assert second["sampling_params"]["max_tokens"] == 60 - kept  # one budget
    ids = [*server.answer_ids(LONG)[:kept], *server.answer_ids(" more")]
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == server.tokenizer.decode(ids)
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["usage"]["prompt_tokens"] == len(first["token_ids"])
    assert (answer["policy_version"], answer["policy_version_max"]) == (0, 1)
    session.finalize(1.0)
    [row] = harness.rows("plan")
    assert row.response_ids.tolist() == ids
    assert spans(row) == [(0, kept), (1, len(ids) - kept)]
    # what was kept has the logprobs it was sampled with: the fake's depend on the place in a request
    logprobs = [*server.logprobs(kept), *server.logprobs(len(ids) - kept)]
    assert row.behavior_logprobs.tolist() == logprobs
    [turn] = row.turns
    assert (turn.version_min, turn.version_max, turn.finish_reason) == (0, 1, "stop")
    assert (row.policy_version, row.policy_version_max) == (0, 1)
    [settlement] = harness.settlements("plan")
    assert settlement.status == "finalized"
    assert 'interruptions_total{model="plan"} ' in harness.http.get("/metrics").text


def test_the_conversation_goes_on_from_an_interrupted_turn(harness: GatewayHarness) -> None:
    session = harness.open_session()
    text = asked_and_flipped(harness, lambda: session.chat("x")).json()["choices"][0]["message"]["content"]
    harness.server.token_delay_s = 0.0
    opening = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    session.chat([*opening, {"role": "user", "content": "and?"}])
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    assert [(t.version_min, t.version_max) for t in row.turns] == [(0, 1), (1, 1)]


def test_each_flip_interrupts_again_and_the_oldest_tokens_stay_open_work(harness: GatewayHarness) -> None:
    harness.server.answers = [LONG, LONG, LONG, " more"]
    session = harness.open_session()
    open_versions: list[int] = []

    def flip_and_look(version: int) -> None:
        asked = len(harness.server.requests)
        harness.renew("plan", published_version=version)
        until(lambda: len(harness.server.requests) > asked, "it did not go on")
        answer = harness.renew("plan", published_version=version)
        assert answer["inflight_versions"] == {str(version): 1}  # the older ones may be unloaded
        open_versions.append(answer["oldest_open_version"])

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: session.chat("x", max_tokens=60))
        for version in (4, 5, 6):
            until(lambda: harness.server.requests, "the server was not asked")
            time.sleep(0.08)
            flip_and_look(version)
        assert slow.result(10).status_code == 200
    assert open_versions == [0, 0, 0]
    session.finalize(1.0)
    [row] = harness.rows("plan")
    assert [version for version, _ in spans(row)] == [0, 4, 5, 6]
    assert len(row.response_ids) <= 60
    assert harness.renew("plan", published_version=6)["oldest_open_version"] is None


def test_the_budget_is_one_for_all_versions_and_ends_as_length(harness: GatewayHarness) -> None:
    harness.server.answers = [LONG * 3]
    session = harness.open_session()
    answer = asked_and_flipped(harness, lambda: session.chat("x", max_tokens=20), versions=(1, 2))
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 20
    session.finalize(1.0)
    [row] = harness.rows("plan")
    assert len(row.response_ids) == 20
    assert row.turns[0].finish_reason == "length"


def test_a_seed_is_moved_on_so_that_no_draw_is_repeated(harness: GatewayHarness) -> None:
    session = harness.open_session()
    asked_and_flipped(harness, lambda: session.chat("x", seed=7))
    first, second = (r["sampling_params"]["seed"] for r in harness.server.requests)
    assert first == 7
    assert second == 7 + len(harness.server.requests[1]["token_ids"]) - len(
        harness.server.requests[0]["token_ids"]
    )


def test_a_stream_goes_on_and_its_deltas_name_their_versions(harness: GatewayHarness) -> None:
    session = harness.open_session()
    lines: list[str] = []

    def listen() -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        path = f"/sessions/{session.session_id}/agents/planner/v1/chat/completions"
        with harness.http.stream("POST", path, json=body, headers=session.headers) as response:
            lines.extend(response.iter_lines())

    asked_and_flipped(harness, listen)
    assert '"policy_version":0' in next(line for line in lines if line)
    assert any('"policy_version":1' in line for line in lines)
    assert any('"finish_reason":"stop"' in line for line in lines)
    assert not any('"finish_reason":"abort"' in line for line in lines)
    assert lines.count("data: [DONE]") == 1
    session.finalize(1.0)
    [row] = harness.rows("plan")
    assert [version for version, _ in spans(row)] == [0, 1]


def test_a_server_that_does_not_end_it_lets_it_finish_under_its_own_version(harness: GatewayHarness) -> None:
    harness.server.ignore_aborts = True
    session = harness.open_session()
    answer = asked_and_flipped(harness, lambda: session.chat("x")).json()
    assert answer["choices"][0]["message"]["content"] == LONG
    assert (answer["policy_version"], answer["policy_version_max"]) == (0, 0)
    assert len(harness.server.requests) == 1


def test_what_was_kept_survives_a_replica_that_breaks_off(harness: GatewayHarness) -> None:
    session = harness.open_session()

    def break_the_second() -> Any:
        return session.chat("x", max_tokens=60)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(break_the_second)
        until(lambda: harness.server.requests, "the server was not asked")
        time.sleep(0.1)
        harness.server.fail_next = [500]
        harness.renew("plan", published_version=1)
        assert slow.result(10).status_code == 200
    _, failed, repeated = harness.server.requests
    assert failed["token_ids"] == repeated["token_ids"]
    session.finalize(1.0)
    [row] = harness.rows("plan")
    assert [version for version, _ in spans(row)] == [0, 1]


def test_an_abort_nobody_asked_for_is_no_interruption(harness: GatewayHarness) -> None:
    harness.server.token_delay_s = 0.0
    harness.server.fail_next = ["abort"]
    session = harness.open_session()
    assert session.chat("x").status_code == 200
    first, second = harness.server.requests
    assert first["token_ids"] == second["token_ids"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_weighs_what_was_sampled_so_far_finishes_under_its_version_and_is_counted(
    local_store: Store, fields: dict[str, Any], reason: str
) -> None:
    of_each = PARTIAL | {"rollout": {"tool_call_parser": "hermes"}}
    with live_gateway(local_store, config=make_config(of_each_model=of_each)) as harness:
        harness.start_afresh()
        harness.server.answers, harness.server.token_delay_s = [LONG], 0.015
        session = harness.open_session(mode="eval", group_id="e", group_size=1)
        answer = asked_and_flipped(harness, lambda: session.chat("x", **fields)).json()
        assert len(harness.server.requests) == 1
        assert (answer["policy_version"], answer["policy_version_max"]) == (0, 0)
        kept = f'repertory_gateway_kept_whole_total{{model="plan",reason="{reason}"}} 1.0'
        assert kept in harness.http.get("/metrics").text


def test_a_penalty_on_all_that_was_seen_is_interrupted(harness: GatewayHarness) -> None:
    """repetition_penalty weighs the prompt as well as what was sampled: what is continued counts the same."""
    session = harness.open_session(mode="eval", group_id="e", group_size=1)
    asked_and_flipped(harness, lambda: session.chat("x", repetition_penalty=1.5))
    assert len(harness.server.requests) == 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stop", ["six", "e si", "five six seven"])
def test_a_stop_string_across_the_seam_ends_the_answer_where_one_server_would(
    harness: GatewayHarness, stop: str, streamed: bool
) -> None:
    """Whatever the place of the seam, and though the server that goes on never sees the string whole."""
    server = harness.server
    whole = server.answer_ids(LONG)
    [until_there, _] = LONG.split(stop)
    expected, _ = until_stop(server, whole, [stop])
    server.token_delay_s = 0.0
    for seam in range(len(expected) - 4, len(expected)):
        server.requests.clear()
        server.answer_of = lambda body: whole[len(body["token_ids"]) - len(server.requests[0]["token_ids"]) :]
        session = harness.open_session(mode="eval", group_id=f"e{seam}{streamed}{stop}", group_size=1)
        server.hold_after = seam  # until a new version ends it
        version = harness.gateway.bindings.get("plan").published_version
        assert version is not None
        answer = asked_and_flipped(
            harness,
            lambda session=session: session.chat("x", stop=[stop], stream=streamed, max_tokens=60),
            after_s=0.03,
            versions=(version + 1,),
        )
        server.hold_after = -1
        assert len(server.requests) == 2
        content, reason = heard(answer, streamed)
        assert (content, reason) == (until_there, "stop")
        session.finalize(1.0)
        row = harness.rows("plan", evaluation=True)[-1]
        assert row.response_ids.tolist() == expected
        assert spans(row) == [(version, seam), (version + 1, len(expected) - seam)]
        assert row.turns[0].finish_reason == "stop"


def heard(answer: Any, streamed: bool) -> tuple[str, str]:
    if not streamed:
        [choice] = answer.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["delta"].get("content") or "" for c in choices), choices[-1]["finish_reason"]


def test_a_special_stop_token_is_looked_for_on_both_sides_of_the_seam(harness: GatewayHarness) -> None:
    session = harness.open_session()
    asked_and_flipped(harness, lambda: session.chat("x", stop=["<tool>"]))
    assert [r["sampling_params"]["stop_token_ids"] for r in harness.server.requests] == [[2, 0, 3]] * 2


@pytest.mark.parametrize("streamed", [False, True])
def test_text_and_a_call_cut_by_the_seam_are_parsed_whole(local_store: Store, streamed: bool) -> None:
    call = 'I look.<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    fields = PARTIAL | {"rollout": {"tool_call_parser": "hermes"}, "max_response_tokens": 256}
    with live_gateway(local_store, config=make_config(of_each_model=fields)) as harness:
        harness.start_afresh()
        server = harness.server
        server.token_delay_s = 0.01
        whole = server.answer_ids(call)
        session: LiveSession = harness.open_session()
        url = f"{session.base_url}/agents/planner/v1"

        def continue_where_it_was(body: dict[str, Any]) -> list[int]:
            return whole[len(body["token_ids"]) - len(server.requests[0]["token_ids"]) :]

        def ask() -> Any:
            question: Any = [{"role": "user", "content": "x"}]
            with openai.OpenAI(base_url=url, api_key=session.api_key) as client:
                create = client.chat.completions.create
                if not streamed:
                    return create(model="m", messages=question, tools=[SEARCH]).choices[0].message  # pyright: ignore
                with client.chat.completions.stream(model="m", messages=question, tools=[SEARCH]) as stream:  # pyright: ignore
                    return stream.get_final_completion().choices[0].message

        server.answer_of = continue_where_it_was
        message = asked_and_flipped(harness, ask)
        assert message.content == "I look."
        assert [made.function.name for made in message.tool_calls] == ["search"]
        session.finalize(1.0)
        [row] = harness.rows("plan")
        assert row.response_ids.tolist() == whole
        assert [version for version, _ in spans(row)] == [0, 1]


def test_without_partial_rollout_a_generation_finishes_under_its_version(local_store: Store) -> None:
    with live_gateway(local_store) as harness:
        harness.start_afresh()
        harness.server.answers = [LONG]
        harness.server.token_delay_s = 0.02
        session = harness.open_session()
        answer = asked_and_flipped(harness, lambda: session.chat("x"), after_s=0.1).json()
        assert (answer["policy_version"], answer["policy_version_max"]) == (0, 0)
        assert len(harness.server.requests) == 1


# ------------------------------------------------------------------ the pieces


def piece(ids: list[int], reason: str = "abort") -> Generation:
    return Generation(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray([-0.1 * i for i in ids], np.float32),
        finish_reason=reason,
        stop_reason=None,
        num_prompt_tokens=5,
        num_cached_tokens=2,
    )


def test_pieces_without_tokens_leave_no_version() -> None:
    kept: Counter[int] = Counter()
    pieces = Pieces(kept)
    pieces.add(piece([]), 3)
    whole, versions = pieces.joined(piece([1, 2], "stop"), 4)
    assert (whole.token_ids.tolist(), versions, kept) == ([1, 2], (VersionSpan(4, 2),), Counter())


def test_versions_that_tokens_are_kept_of_are_open_work_until_the_answer_is_let_go_of() -> None:
    kept: Counter[int] = Counter({3: 1})  # another answer's
    pieces = Pieces(kept)
    pieces.add(piece([1]), 3)
    pieces.add(piece([2]), 4)
    pieces.add(piece([3]), 4)
    assert kept == {3: 2, 4: 2}
    pieces.let_go()
    assert dict(kept) == {3: 1}


def test_settings_of_the_rest_never_leave_the_servers_ranges() -> None:
    pieces = Pieces(Counter())
    pieces.add(piece([1, 2, 3]), 0)
    rest = pieces.settings_for_the_rest({"max_tokens": 10, "seed": 2**63 - 1})
    assert rest == {"max_tokens": 7, "seed": 2**63 - 1}
