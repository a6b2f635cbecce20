"""Streams carry what the server samples while it samples it; the record is the same as without."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from gateway.text_stream import MAX_HELD_TOKENS, TextStream
from tests.fakes import make_tokenizer
from tests.gateway_harness import GatewayHarness, LiveSession
from tests.waiting import until

HELLO: Any = [{"role": "user", "content": "hello"}]
PATH = "agents/planner/v1/chat/completions"


def client_of(session: LiveSession, **options: Any) -> openai.OpenAI:
    url = f"{session.base_url}/agents/planner/v1"
    return openai.OpenAI(base_url=url, api_key=session.api_key, **options)


def chains_of(session: LiveSession) -> list[Any]:
    open_session = session.harness.gateway.sessions._sessions[session.session_id]
    return [chain for owner in open_session.agents.values() for chain in owner.chains]


# ------------------------------------------------------------------ OpenAI's SDK, unchanged


def test_deltas_come_while_the_server_samples_and_the_record_is_exact(harness: GatewayHarness) -> None:
    harness.server.answers = ["the answer is naïve 🙂 indeed", "more"]
    harness.server.token_delay_s = 0.02
    session = harness.open_session()
    with client_of(session) as client:
        came_at, text, finish = [], "", None
        stream = client.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        usage = None
        for chunk in stream:
            assert chunk.model == "m"
            assert (chunk.model_extra or {})["policy_version"] == 0
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    came_at.append(time.monotonic())
                    text += choice.delta.content
        assert text == "the answer is naïve 🙂 indeed"
        assert finish == "stop"
        assert len(came_at) > 5
        assert came_at[-1] - came_at[0] > 0.1
        sampled = harness.server.answer_ids(text)
        assert usage is not None
        assert usage.completion_tokens == len(sampled)
        assert usage.prompt_tokens == len(harness.server.requests[0]["token_ids"])
        follow = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        client.chat.completions.create(model="m", messages=follow)
    assert session.finalize(1.0)["num_rows"] == {"plan": 1}
    [row] = harness.rows("plan")
    first = slice(row.turns[0].start, row.turns[0].end)
    assert row.response_ids[first].tolist() == sampled
    assert row.behavior_logprobs[first].tolist() == harness.server.logprobs(len(sampled))


async def test_the_async_client_streams_logprobs_of_every_token(harness: GatewayHarness) -> None:
    session = harness.open_session()
    harness.server.answers = ["naïve 🙂"]
    url = f"{session.base_url}/agents/planner/v1"
    found, texts = [], []
    async with openai.AsyncOpenAI(base_url=url, api_key=session.api_key) as client:
        async for chunk in await client.chat.completions.create(
            model="m", messages=HELLO, stream=True, logprobs=True
        ):
            assert chunk.usage is None
            for choice in chunk.choices:
                texts.append(choice.delta.content or "")
                found += [t.logprob for t in (choice.logprobs and choice.logprobs.content) or []]
    assert "".join(texts) == "naïve 🙂"
    assert found == harness.server.logprobs(len(harness.server.answer_ids("naïve 🙂")))


def test_an_answer_cut_by_length_ends_as_length_and_keeps_its_half_character(harness: GatewayHarness) -> None:
    session = harness.open_session()
    harness.server.answers = ["a🙂"]
    with client_of(session) as client:
        stream = client.chat.completions.create(model="m", messages=HELLO, stream=True, max_tokens=3)
        choices = [choice for chunk in stream for choice in chunk.choices]
    assert choices[-1].finish_reason == "length"
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == "a\ufffd"
    # What the agent heard continues the chain.
    follow = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
    session.chat(follow)
    assert session.finalize()["num_rows"] == {"plan": 1}


def test_a_streamed_and_a_plain_call_leave_the_same_record(harness: GatewayHarness) -> None:
    rows = []
    for stream in (False, True):
        harness.start_afresh()
        session = harness.open_session()
        session.chat(HELLO, stream=stream)
        session.finalize(1.0)
        [row] = harness.rows("plan")
        rows.append(row)
    plain, streamed = rows
    assert plain.prompt_ids.tolist() == streamed.prompt_ids.tolist()
    assert plain.response_ids.tolist() == streamed.response_ids.tolist()
    assert plain.behavior_logprobs.tolist() == streamed.behavior_logprobs.tolist()


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("how", ["drop", "error", "end", "abort"])
def test_a_stream_that_breaks_off_goes_on_from_its_own_tokens(harness: GatewayHarness, how: str) -> None:
    server, text = harness.server, "a long answer that breaks"
    whole = server.answer_ids(text)
    server.answer_of = lambda body: whole[len(body["token_ids"]) - len(server.requests[0]["token_ids"]) :]
    server.break_after, server.break_by = 4, how
    session = harness.open_session()
    with client_of(session) as client:
        stream = client.chat.completions.create(
            model="m", messages=HELLO, stream=True, logprobs=True, max_tokens=60, seed=3
        )
        choices = [choice for chunk in stream for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == text
    assert choices[-1].finish_reason == "stop"
    first, second = server.requests
    assert second["token_ids"] == first["token_ids"] + whole[:4]
    assert (first["model"], second["model"]) == ("plan@v0", "plan@v0")
    assert second["sampling_params"]["max_tokens"] == 60 - 4  # one budget
    assert second["sampling_params"]["seed"] == 3 + 4  # no draw is repeated
    assert session.finalize(1.0)["status"] == "finalized"
    [row] = harness.rows("plan")
    assert row.response_ids.tolist() == whole
    logprobs = [*server.logprobs(4), *server.logprobs(len(whole) - 4)]
    assert row.behavior_logprobs.tolist() == logprobs
    heard = [
        token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content or ()
    ]
    assert heard == logprobs
    [turn] = row.turns
    assert (turn.version_min, turn.version_max, turn.finish_reason) == (0, 0, "stop")


def follow_up_that_breaks(harness: GatewayHarness, session: LiveSession, **fields: Any) -> openai.APIError:
    """The error that the stream of a second turn ends with, after its first tokens."""
    session.chat(HELLO)
    follow: Any = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
    harness.server.answers = ["a long answer that breaks"]
    harness.server.break_after = 4
    with client_of(session) as client:
        stream = client.chat.completions.create(model="m", messages=follow, stream=True, **fields)
        heard = []
        with pytest.raises(openai.APIError) as caught:
            heard.extend(chunk for chunk in stream)
    assert heard
    [chain] = chains_of(session)
    assert (len(chain.turns), chain.reserved) == (1, False)
    return caught.value


def code_of(error: openai.APIError) -> str:
    assert isinstance(error.body, dict)
    return error.body["code"]


def test_a_stream_that_can_not_go_on_ends_with_an_error_event_and_leaves_no_half_turn(
    harness: GatewayHarness,
) -> None:
    harness.server.fail_after_break = [422]
    session = harness.open_session()
    assert "refused with 422" in str(follow_up_that_breaks(harness, session))
    assert session.finalize(1.0)["status"] == "finalized"  # the server's own 4xx: not the infrastructure's


def test_a_stream_whose_server_weighs_what_it_sampled_fails_whole(harness: GatewayHarness) -> None:
    session = harness.open_session(mode="eval", group_id="e", group_size=1)
    error = follow_up_that_breaks(harness, session, presence_penalty=0.5)
    assert code_of(error) == "backend_unavailable"
    assert session.finalize(1.0)["status"] == "infra"


def test_a_stream_that_breaks_before_a_new_version_fails_whole(harness: GatewayHarness) -> None:
    """Without partial_rollout an answer is of one version."""
    session, server = harness.open_session(), harness.server
    server.fail_after_break = [500] * 4  # time to publish in
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(follow_up_that_breaks, harness, session)
        until(lambda: len(server.requests) == 3, "the stream was not tried again")
        harness.renew("plan", published_version=1)
        error = failing.result(10)
    assert code_of(error) == "backend_unavailable"
    assert "partial_rollout" in str(error)
    assert {request["model"] for request in server.requests} == {"plan@v0"}
    assert session.finalize(1.0)["status"] == "infra"


@pytest.mark.parametrize("failure", [500, 404, "drop"])
def test_a_failure_before_the_first_token_is_repeated_unseen(
    harness: GatewayHarness, failure: int | str
) -> None:
    harness.server.fail_next = [failure]
    session = harness.open_session()
    answer = session.chat(HELLO, stream=True)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(harness.server.requests) == 2
    assert session.finalize(1.0)["status"] == "finalized"


def test_a_refusal_before_the_first_token_has_its_status(harness: GatewayHarness) -> None:
    session = harness.open_session()
    harness.server.fail_next = [422]
    refused = session.chat(HELLO, stream=True)
    assert refused.status_code == 422
    assert "refused with 422" in refused.json()["error"]["message"]


def test_a_client_that_hangs_up_releases_the_chain_and_ends_the_generation(harness: GatewayHarness) -> None:
    session = harness.open_session()
    session.chat(HELLO)
    follow = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "x"}]
    harness.server.answers = ["a long answer that nobody waits for"]
    harness.server.token_delay_s = 0.2
    with (
        httpx.Client(base_url=session.base_url, headers=session.headers) as http,
        http.stream("POST", PATH, json={"messages": follow, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
    until(lambda: harness.server.aborted, "the generation was not ended on the server")
    [chain] = chains_of(session)
    until(lambda: not chain.reserved, "the chain stayed reserved")
    assert len(chain.turns) == 1
    harness.server.token_delay_s = 0.0
    session.chat(follow)
    assert len(chain.turns) == 2
    assert session.finalize(1.0)["status"] == "finalized"


def test_a_retry_of_a_stream_joins_it_and_hears_all_of_it(harness: GatewayHarness) -> None:
    harness.server.token_delay_s = 0.05
    session = harness.open_session()
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: session.chat(HELLO, stream=True).text, range(2)))
    later = session.chat(HELLO, stream=True).text
    for text in (*answers, later):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "hello"
        assert len({e["id"] for e in events}) == 1
    assert len(harness.server.requests) == 1
    assert session.finalize()["num_rows"] == {"plan": 1}


# ------------------------------------------------------------------ characters


TEXTS = ["plain words", "naïve 漢字 🙂👩‍👩‍👧", "  spaces  and\nlines\n", "a<|im_end|>b", "ends in 🙂"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("step", [1, 2, 5])
def test_pieces_add_up_to_the_text_and_never_hold_half_a_character(text: str, step: int) -> None:
    tokenizer = make_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextStream(decode)
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert not any("\ufffd" in piece for piece in pieces)
    pieces.append(stream.finish(decode(ids)))
    assert "".join(pieces) == decode(ids) == stream.text


def test_bytes_that_are_no_text_are_not_held_for_ever() -> None:
    tokenizer = make_tokenizer()
    broken = tokenizer.encode("🙂", add_special_tokens=False).ids[:1] * 100
    stream = TextStream(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True))
    given = "".join(stream.push([id_]) for id_ in broken)
    assert len(given) >= 100 - MAX_HELD_TOKENS - 1
    stream.finish(tokenizer.decode(broken))
    assert stream.text == tokenizer.decode(broken)
