"""A gateway's next process has its open sessions: here from the journal as it was when the first one died."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import pytest

from gateway.journal import Append, SessionJournal
from gateway.journal_events import ExecutionWritten, OutcomeDecided, RewardGiven, TurnCommitted, encode_event
from model_runtime.config import StoreConfig
from model_runtime.layout import RunLayout
from model_runtime.local_store import LocalStore
from model_runtime.removed_log import NOTHING_REMOVED
from model_runtime.store import Store
from tests.gateway_harness import RUN_ID, GatewayHarness, LiveSession, live_gateway, make_config

FIRST_TRY = {"x-stainless-retry-count": "0"}
SECOND_TRY = {"x-stainless-retry-count": "1"}


class Lives:
    """The lives of one gateway: each has the store, and the journal as it was when the life before died."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self._num_lives = 0
        self._stack = ExitStack()

    def begin(self, journal: Path | None = None, **config: Any) -> GatewayHarness:
        self._num_lives += 1
        harness = self._stack.enter_context(
            live_gateway(
                self.store,
                config=make_config(**config),
                journal=journal or self.folder / f"life-{self._num_lives}" / "1.journal",
                incarnation=self._num_lives,
            )
        )
        harness.make_ready()
        return harness

    def crash(self, harness: GatewayHarness, **config: Any) -> GatewayHarness:
        """The next life. The one before goes on, but nobody speaks to it any more."""
        next_harness = self.begin(self.snapshot(harness), **config)
        next_harness.group_id = harness.group_id
        return next_harness

    def snapshot(self, harness: GatewayHarness) -> Path:
        """A copy of the journal as a process that died now would leave it."""
        journal = harness.gateway._journal.path
        assert journal is not None
        copy = self.folder / f"copy-{time.monotonic_ns()}"
        shutil.copytree(journal.parent, copy)
        return copy / journal.name


@pytest.fixture
def lives(local_store: Store, tmp_path: Path) -> Iterator[Lives]:
    found = Lives(local_store, tmp_path / "journals")
    with found._stack:
        yield found


@pytest.fixture
def before(lives: Lives) -> GatewayHarness:
    harness = lives.begin()
    harness.open_group()
    return harness


def moved(session: LiveSession, harness: GatewayHarness) -> LiveSession:
    """The same session, at the gateway's next process."""
    return LiveSession(harness, session.session_id, session.base_url, session.api_key, session.workflow_id)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


# ------------------------------------------------------------------ conversations


def test_a_conversation_goes_on_in_its_chain(lives: Lives, before: GatewayHarness) -> None:
    session = before.open_session()
    before.server.answers = ["A", "B"]
    session.chat([user("a")])
    session.chat([user("a"), said("A"), user("b")], agent="planner")
    session.chat([user("other")], agent="searcher")
    after = lives.crash(before)
    after.server.answers = ["C"]
    session = moved(session, after)
    assert session.chat([user("a"), said("A"), user("b"), said("B"), user("c")]).status_code == 200
    assert session.finalize(1.0)["num_rows"] == {"plan": 1, "solve": 1}
    [row] = after.rows("plan")
    asked = [request["token_ids"] for request in [*before.server.requests[:2], *after.server.requests]]
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    assert [ids[: len(given)] for given in asked] == asked
    sampled = [id_ for text in "ABC" for id_ in before.server.answer_ids(text)]
    assert row.response_ids[row.response_mask == 1].tolist() == sampled
    assert [turn.turn_index for turn in row.turns] == [0, 1, 2]
    assert len({turn.request_id for turn in row.turns}) == 3


def test_failures_that_were_made_good_and_those_that_were_not_outlive_the_crash(lives: Lives) -> None:
    harness = lives.begin(request_timeout_s=0.5)
    harness.open_group()
    mended, broken = harness.open_session(0), harness.open_session(1)
    harness.server.fail_next = [500] * 30
    for session in (mended, broken):
        assert session.chat("x", headers=FIRST_TRY).status_code == 503
    harness.server.fail_next = []
    assert mended.chat("x", headers=SECOND_TRY).status_code == 200
    after = lives.crash(harness)
    ends = [moved(session, after).finalize(1.0)["status"] for session in (mended, broken)]
    assert ends == ["finalized", "infra"]


def test_a_rollback_outlives_the_crash_and_a_turn_can_be_taken_back_after_it(
    lives: Lives, before: GatewayHarness
) -> None:
    session = before.open_session()
    before.server.answers = ["A", "B", "C"]
    session.chat([user("a")])
    session.chat([user("a"), said("A"), user("b")])
    session.chat([user("a"), said("A"), user("b"), said("B, rewritten"), user("c")])
    after = lives.crash(before)
    after.server.answers = ["D"]
    session = moved(session, after)
    rewritten = [user("a"), said("A"), user("b"), said("B, rewritten"), user("c"), said("C, too"), user("d")]
    session.chat(rewritten)
    assert session.finalize()["num_rows"] == {"plan": 1}
    [row] = after.rows("plan")
    sampled = [id_ for text in "AD" for id_ in before.server.answer_ids(text)]
    assert row.response_ids[row.response_mask == 1].tolist() == sampled


def test_only_the_sessions_own_key_opens_it(lives: Lives, before: GatewayHarness) -> None:
    session, other = before.open_session(), before.open_session(member=1)
    after = lives.crash(before)
    stranger = moved(session, after)
    stranger.api_key = other.api_key
    assert stranger.chat("hi").status_code == 401
    assert moved(session, after).chat("hi").status_code == 200


def test_a_generation_that_was_running_leaves_nothing(lives: Lives, before: GatewayHarness) -> None:
    session = before.open_session()
    session.chat("first")
    before.server.delay_s = 3.0
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(session.chat, "second")
        while len(before.server.requests) < 2:
            time.sleep(0.01)
        after = lives.crash(before)
        session = moved(session, after)
        assert session.chat("second", headers=SECOND_TRY).status_code == 200
        assert session.finalize()["num_rows"] == {"plan": 2}
        running.result()


@pytest.mark.parametrize("headers", [{"Idempotency-Key": "k"}, FIRST_TRY])
def test_an_answered_call_that_is_asked_again_gets_its_answer_and_no_second_generation(
    lives: Lives, before: GatewayHarness, headers: dict[str, str]
) -> None:
    session = before.open_session()
    first = session.chat("hi", headers=headers, logprobs=True)
    after = lives.crash(before)
    session = moved(session, after)
    again = session.chat("hi", headers=headers | SECOND_TRY, logprobs=True)
    assert again.json() == first.json()
    assert after.server.requests == []
    other = session.chat("hi", headers={"Idempotency-Key": "another"})
    assert other.json()["request_id"] != first.json()["request_id"]
    assert session.finalize()["num_rows"] == {"plan": 2}


def test_all_choices_of_a_call_are_answered_again(lives: Lives, before: GatewayHarness) -> None:
    session = before.open_session()
    before.server.answers = ["A", "B", "C"]
    first = session.chat("hi", headers=FIRST_TRY, n=3, logprobs=True)
    after = lives.crash(before)
    session = moved(session, after)
    assert session.chat("hi", headers=SECOND_TRY, n=3, logprobs=True).json() == first.json()
    assert len(first.json()["choices"]) == 3
    assert session.finalize()["num_rows"] == {"plan": 3}
    assert after.server.requests == []


def test_what_a_turn_adds_to_the_journal_does_not_grow_with_the_conversation(
    lives: Lives, before: GatewayHarness
) -> None:
    session, messages = before.open_session(), [user("a")]
    for _ in range(12):
        assert session.chat(messages).status_code == 200
        messages += [said("hello"), user("and then?")]
    before.on_loop(before.gateway._journal.durable())
    journal = SessionJournal(lives.snapshot(before), run_id=RUN_ID, epoch=1)
    turns = [e for events in journal.load().values() for e in events if isinstance(e, TurnCommitted)]
    sizes = [len(encode_event(turn)) for turn in turns]
    assert len(sizes) == 12
    assert max(sizes[1:]) - min(sizes[1:]) <= 8  # the width of a number
    before.on_loop(journal.close())


# ------------------------------------------------------------------ rewards and ends


def test_a_call_of_several_choices_is_answered_again_with_all_of_them_and_goes_on(
    lives: Lives, before: GatewayHarness
) -> None:
    before.server.answers = ["one", "two"]
    session = before.open_session()
    asked: dict[str, Any] = {"n": 2, "logprobs": True, "top_logprobs": 2}
    first = session.chat([user("a")], headers=FIRST_TRY, **asked).json()
    after = lives.crash(before)
    session = moved(session, after)
    again = session.chat([user("a")], headers=SECOND_TRY, **asked).json()
    assert again["choices"] == first["choices"]
    assert after.server.requests == []
    after.server.answers = ["three"]
    session.chat([user("a"), said("two"), user("b")])
    assert session.finalize(1.0)["num_rows"] == {"plan": 2}
    assert sorted(len(row.turns) for row in after.rows("plan")) == [1, 2]


def test_rewards_and_what_failed_are_kept(lives: Lives, before: GatewayHarness) -> None:
    session, failed = before.open_session(), before.open_session(member=1)
    request_id = session.chat("hi").json()["request_id"]
    for body in (
        {"reward": 0.5},
        {"reward": 0.25, "agent_id": "planner", "component": "style"},
        {"reward": 1.0, "request_id": request_id},
        {"reward": 9.0, "component": "gone"},
        {"reward": None, "component": "gone"},
    ):
        assert session.post("reward", body).status_code == 200
    before.renew("plan", status="failed")
    assert failed.chat("hi").status_code == 503
    after = lives.crash(before)
    session = moved(session, after)
    session.post("reward", {"reward": 0.75, "agent_id": "planner"})
    assert session.finalize()["status"] == "finalized"
    assert moved(failed, after).finalize(1.0)["status"] == "infra"
    [row] = after.rows("plan")
    assert row.workflow_rewards == {"reward": 0.5}
    assert row.agent_rewards == {"style": 0.25, "reward": 0.75}
    assert row.turns[0].rewards == {"reward": 1.0}


def test_a_settled_session_gives_the_same_answer_again(lives: Lives, before: GatewayHarness) -> None:
    session = before.open_session()
    session.chat("hi")
    answer = session.finalize(1.0)
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    session = moved(session, after)
    assert session.finalize() == answer
    assert session.post("abort").json() == answer
    assert session.chat("hi").status_code == 409
    session.api_key = "rk-wrong"
    assert session.post("finalize").status_code == 401
    assert len(after.settlements("plan")) == len(after.rows("plan")) == 1


class CrashingStore(LocalStore):
    """Calls `before_put` with each key before it is created."""

    def __init__(self, folder: Path) -> None:
        super().__init__(StoreConfig(url=str(folder)))
        self._one_by_one = Lock()
        self.before_put: Callable[[str], None] = lambda key: None

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._one_by_one:
            self.before_put(key)
            return super().put_if_absent(key, data)

    def delete(self, key: str) -> None:
        with self._one_by_one:
            self.before_put(key)
            super().delete(key)


def test_a_session_that_was_being_settled_is_settled_once_wherever_the_crash_was(tmp_path: Path) -> None:
    store = CrashingStore(tmp_path / "store")
    crashes: list[tuple[Path, Path]] = []
    first = Lives(store, tmp_path / "journals")
    with first._stack:
        before = first.begin()
        before.open_group()
        session, other = before.open_session(), before.open_session(member=1)
        session.chat("hi")
        session.chat("hi", agent="searcher")
        other.chat("hi", agent="searcher")

        def crash(_: str) -> None:
            copy = tmp_path / f"store-{len(crashes)}"
            shutil.copytree(tmp_path / "store", copy)
            crashes.append((first.snapshot(before), copy))

        store.before_put = crash
        answer = session.finalize(0.5)
        store.before_put = lambda key: None
        crash("all is written, and the journal may know it or not")
    assert len(crashes) >= 5  # the entry, a shard a model, the entry's end
    for journal, copy in crashes:
        lives = Lives(LocalStore(StoreConfig(url=str(copy))), tmp_path / f"after-{copy.name}")
        lives._num_lives = 1
        with lives._stack:
            after = lives.begin(journal)
            assert moved(session, after).finalize() == answer
            assert moved(other, after).finalize(1.0)["status"] == "finalized"
            ends = [(s.member.member_index, s.status) for s in after.settlements("solve")]
            assert sorted(ends) == [(0, "finalized"), (1, "finalized")]
            assert len(after.rows("plan")) == 1
            assert len(after.rows("solve")) == 2
            assert after.gateway.admission.num_open == 0


def test_an_execution_whose_shard_retention_has_removed_meanwhile_is_not_written_again(
    lives: Lives, before: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = before.open_session(), before.open_session(member=1)
    session.chat("hi")
    other.chat("hi")
    journals: list[Path] = []
    delete = before.gateway._store.delete

    def entry_goes(key: str) -> None:
        journals.append(lives.snapshot(before))
        delete(key)

    monkeypatch.setattr(before.gateway._store, "delete", entry_goes)
    answer = session.finalize(0.5)
    monkeypatch.undo()
    other.finalize(1.0)
    layout = RunLayout(RUN_ID)
    for model_id in ("plan", "solve"):
        model = layout.model(model_id)
        removal = msgspec.structs.replace(NOTHING_REMOVED, number=1, floor={"e00001-00001": 1})
        lives.store.put(model.removal(1), removal.to_bytes())
        lives.store.delete(model.log_shard("e00001-00001", 0))
    after = lives.begin(journals[0])
    assert moved(session, after).finalize() == answer
    assert [s.member.member_index for s in after.settlements("plan")] == [1]


def test_each_of_two_evaluations_at_one_task_ends_once_with_its_own_rows_though_the_gateway_dies(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lives.begin(commit_interval_s=0.3)
    sessions = [before.open_session(0, "held-out", mode="eval") for _ in range(2)]
    for num_calls, session in enumerate(sessions, start=1):
        for number in range(num_calls):
            session.chat(f"question {number}")
    journals: list[Path] = []
    delete = before.gateway._store.delete

    def entry_goes(key: str) -> None:
        journals.append(lives.snapshot(before))
        delete(key)

    monkeypatch.setattr(before.gateway._store, "delete", entry_goes)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda session: session.finalize(1.0), sessions))
    monkeypatch.undo()
    after = lives.begin(journals[0])
    assert [moved(session, after).finalize() for session in sessions] == answers
    written = Counter(row.session_id for row in after.rows("plan", evaluation=True))
    assert written == {session.session_id: n for n, session in enumerate(sessions, start=1)}


def test_a_note_of_an_evaluation_that_names_no_session_ends_none(
    lives: Lives, before: GatewayHarness
) -> None:
    session = before.open_session(0, "held-out", mode="eval")
    session.chat("hi")
    member = next(s.member for s in before.gateway.sessions if s.session_id == session.session_id)
    key = RunLayout(RUN_ID).model("plan").eval_shard("e00001-00001", 0)
    lives.store.put(key, b"another session's")
    note = ExecutionWritten(member, "eval", "finalized", key, "e00001-00001", 0, (key,))
    before.gateway._journal.write(Append("writing/eval/held-out/0/0", note))
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    assert moved(session, after).finalize(1.0)["num_rows"] == {"plan": 1}
    assert after.gateway.metrics.settlements == {}
    lives.store.delete(key)
    assert [row.session_id for row in after.rows("plan", evaluation=True)] == [session.session_id]
    after.on_loop(after.gateway._journal.durable())
    journal = SessionJournal(lives.snapshot(after), run_id=RUN_ID, epoch=1)
    assert not [owner for owner in journal.load() if owner.startswith("writing/")]
    after.on_loop(journal.close())


def test_what_was_decided_is_settled_without_being_asked(lives: Lives, before: GatewayHarness) -> None:
    session = before.open_session()
    session.chat("hi")
    live = next(s for s in before.gateway.sessions if s.session_id == session.session_id)
    live.outcome = ("aborted", "the workflow raised")
    live.note(OutcomeDecided("aborted", "the workflow raised"))
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    deadline = time.monotonic() + 10
    while not after.settlements("plan"):
        assert time.monotonic() < deadline, "it was not settled"
        time.sleep(0.02)
    [end] = after.settlements("plan")
    assert (end.status, end.reason) == ("aborted", "the workflow raised")


# ------------------------------------------------------------------ groups


def test_an_open_group_goes_on_with_its_members_and_its_train_map(
    lives: Lives, before: GatewayHarness
) -> None:
    before.renew("solve", limit=1)
    before.open_group("full", size=1)
    answer = before.open_group("g-open", size=3)
    assert answer["train"] == {"plan": True, "solve": False}
    before.open_session(0, "g-open", group_size=3).finalize(1.0)
    retried = before.open_session(1, "g-open", group_size=3)
    retried.post("abort", {"status": "retried"})
    running = before.open_session(2, "g-open", group_size=3)
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    assert after.open_group("g-open", size=3) == answer
    assert after.ask_for_session(0, "g-open", group_size=3).status_code == 409  # settled
    assert after.ask_for_session(1, "g-open", group_size=3).status_code == 409  # its attempt 0 is over
    assert after.ask_for_session(2, "g-open", group_size=3, attempt=1).status_code == 409  # under way
    again = after.ask_for_session(2, "g-open", group_size=3).json()
    assert (again["session_id"], again["api_key"]) == (running.session_id, running.api_key)
    session = after.open_session(1, "g-open", group_size=3, attempt=1)
    session.chat("hi", agent="searcher")
    session.finalize(1.0)
    moved(running, after).finalize(1.0)
    after.group_id = "g-open"
    [row] = after.rows("solve")
    assert not row.train
    assert (
        after.http.post(
            "/groups", json={"group_id": "g-open", "group_size": 3, "wait_s": 0}, headers=after.admin
        ).status_code
        == 409
    )


def test_times_go_on_while_no_gateway_runs(lives: Lives, before: GatewayHarness) -> None:
    before.open_group("short", size=2, deadline_s=1.5)
    session = before.open_session(0, "short")
    short = before.open_session(0, timeout_s=1.5)
    session.chat("hi")
    journal = lives.snapshot(before)
    time.sleep(1.6)
    after = lives.begin(journal)
    deadline = time.monotonic() + 10
    while len(after.gateway.sessions) or after.gateway.admission.num_open > 1:
        assert time.monotonic() < deadline, "they did not expire"
        time.sleep(0.05)
    assert after.gateway.metrics.settlements == {"expired": 3}  # a member was never opened
    assert moved(short, after).finalize()["status"] == "expired"


def test_groups_that_no_trainer_has_read_stay_in_the_budget(lives: Lives, before: GatewayHarness) -> None:
    for member in (0, 1):
        before.open_session(member).finalize(1.0)
    before.open_group("g-next")
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    assert after.gateway.admission.used("plan") == 2.0
    after.renew("plan", queue={"read_positions": {"e00001-00001": 2}})
    assert after.gateway.admission.used("plan") == 1.0


# ------------------------------------------------------------------ what can't be recovered


def test_groups_open_without_a_model_that_had_failed_before_the_gateway_died(
    lives: Lives, before: GatewayHarness
) -> None:
    before.renew("solve", status="failed", reason="CUDA out of memory", trainer_state="failed")
    journal = lives.snapshot(before)
    with live_gateway(lives.store, config=make_config(), journal=journal, incarnation=7) as after:
        after.make_ready("plan")
        assert after.open_group("g-after", wait_s=0.1)["status"] == "waiting"  # it may be about to register
        sign = {"role": "parent", "failed_models": ["solve"]}
        after.http.post("/admin/alive", json=sign, headers=after.admin).raise_for_status()
        assert after.open_group("g-after")["train"] == {"plan": True, "solve": False}


def test_sessions_of_a_journal_that_makes_no_sense_are_lost_and_the_gateway_starts(
    lives: Lives, before: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    session = before.open_session()
    before.gateway._journal.write(Append("session/unheard-of", RewardGiven("reward", 1.0)))
    before.on_loop(before.gateway._journal.durable())
    after = lives.crash(before)
    assert "can't be used, so the sessions in it are lost" in caplog.text
    assert moved(session, after).chat("hi").status_code == 404
    assert after.open_group()["status"] == "open"
    assert after.open_session().chat("hi").status_code == 200


def test_a_session_that_is_idle_for_too_long_expires_with_the_reason(lives: Lives) -> None:
    harness = lives.begin(session_idle_s=0.8)
    harness.open_group()
    idle, busy = harness.open_session(), harness.open_session(member=1)
    harness.server.delay_s = 1.5
    assert busy.chat("hi").status_code == 200  # a call that runs is no idleness
    assert idle.finalize()["status"] == "expired"
    assert busy.finalize()["status"] == "finalized"
    [end] = [s for s in harness.settlements("plan") if s.status == "expired"]
    assert end.reason == "nothing was asked of it for gateway.session_idle_s = 0.8 s"


def test_a_finished_execution_goes_on_awaiting_its_rewards(lives: Lives, before: GatewayHarness) -> None:
    first, second = before.open_session(0), before.open_session(1)
    awaits = [{"component": "a"}, {"component": "b"}]
    for session in (first, second):
        session.chat("x")
        body = {"reward_deadline_s": 3600, "awaits": awaits}
        assert session.post("finalize", body).status_code == 202
    first.post("reward", {"reward": 1.0, "component": "a"})
    after = lives.crash(before)
    first, second = moved(first, after), moved(second, after)
    assert first.chat("y").status_code == 409
    answer = first.post("finalize", {"reward_deadline_s": 3600, "awaits": awaits})
    assert [a["component"] for a in answer.json()["awaits"]] == ["b"]
    first.post("reward", {"reward": 2.0, "component": "b"})
    assert second.post("finalize").json()["status"] == "finalized"
    assert first.post("finalize").json()["status"] == "finalized"
    rewards = {row.member.member_index: dict(row.workflow_rewards) for row in after.rows("plan")}
    assert rewards == {0: {"a": 1.0, "b": 2.0}, 1: {}}
