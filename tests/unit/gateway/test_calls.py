"""The ledger of a session's calls."""

from __future__ import annotations

import asyncio

import pytest

from gateway import calls
from gateway.calls import MAX_REMEMBERED, REMEMBERED_FOR_S, CallIdentity, CallLedger, Claimed
from model_runtime.errors import ConflictError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def identity(name: str) -> CallIdentity:
    return CallIdentity(name, name.encode())


async def answer(ledger: CallLedger[str], name: str, text: str) -> str:
    async def work(claimed: Claimed) -> str:
        return text

    reply = await ledger.run(identity(name), work)
    await asyncio.sleep(0)  # the ledger hears of the end
    return reply


async def test_a_finished_call_is_answered_from_the_record_for_a_while_and_then_forgotten() -> None:
    clock = Clock()
    ledger: CallLedger[str] = CallLedger(clock=clock)
    assert await answer(ledger, "a", "first") == "first"
    clock.now = REMEMBERED_FOR_S
    assert await answer(ledger, "a", "second") == "first"
    clock.now += 0.1
    assert await answer(ledger, "a", "third") == "third"


async def test_only_the_latest_finished_calls_are_remembered_and_none_that_runs_is_forgotten() -> None:
    clock = Clock()
    ledger: CallLedger[str] = CallLedger(clock=clock)
    release = asyncio.Event()

    async def slow(claimed: Claimed) -> str:
        await release.wait()
        return "slow"

    running = asyncio.create_task(ledger.run(identity("slow"), slow))
    for number in range(MAX_REMEMBERED + 3):
        await answer(ledger, str(number), "first")
    clock.now = 10 * REMEMBERED_FOR_S - 1
    joined = asyncio.create_task(answer(ledger, "slow", "again"))
    await asyncio.sleep(0)
    release.set()
    assert await running == await joined == "slow"


async def test_the_oldest_of_too_many_finished_calls_goes_first() -> None:
    ledger: CallLedger[str] = CallLedger(clock=Clock())
    for number in range(MAX_REMEMBERED + 1):
        await answer(ledger, str(number), "first")
    assert await answer(ledger, "1", "second") == "first"  # of the latest, all are there
    assert await answer(ledger, "0", "second") == "second"


class Recorder:
    """A call that samples until it is released and then records, once it is claimed."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.recorded: list[str] = []
        self.started = 0

    async def __call__(self, claimed: Claimed) -> str:
        self.started += 1
        await self.release.wait()
        await claimed()
        self.recorded.append("answer")
        return "answer"


REPEATS = CallIdentity("call", b"call", repeats=True)


async def hung_up(ledger: CallLedger[str], call: CallIdentity, work: Recorder) -> None:
    client = asyncio.create_task(ledger.run(call, work))
    await asyncio.sleep(0.01)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)


async def test_a_client_that_gave_up_and_comes_back_gets_the_generation_it_left() -> None:
    ledger, work = CallLedger[str](), Recorder()
    await hung_up(ledger, REPEATS, work)
    again = asyncio.create_task(ledger.run(REPEATS, work))
    await asyncio.sleep(0.01)
    work.release.set()
    assert await again == "answer"
    assert (work.started, work.recorded) == (1, ["answer"])


async def test_what_was_sampled_while_nobody_waited_is_recorded_when_the_client_is_back() -> None:
    ledger, work = CallLedger[str](), Recorder()
    await hung_up(ledger, REPEATS, work)
    work.release.set()
    await asyncio.sleep(0.02)
    assert work.recorded == []
    assert await ledger.run(REPEATS, work) == "answer"
    assert (work.started, work.recorded) == (1, ["answer"])


async def test_a_client_that_does_not_come_back_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETURN_WITHIN_S", 0.02)
    ledger, work = CallLedger[str](), Recorder()
    await hung_up(ledger, REPEATS, work)
    work.release.set()
    await asyncio.sleep(0.1)
    assert (work.recorded, ledger.num_running) == ([], 0)


async def test_a_client_that_never_repeats_a_request_ends_its_generation_at_once() -> None:
    ledger, work = CallLedger[str](), Recorder()
    await hung_up(ledger, CallIdentity("call", b"call"), work)
    await asyncio.sleep(0.01)
    assert ledger.num_running == 0


class Reluctant(Recorder):
    """A call that is over some time after it was cancelled: it closes its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.may_let_go = asyncio.Event()

    async def __call__(self, claimed: Claimed) -> str:
        try:
            return await super().__call__(claimed)
        finally:
            await self.may_let_go.wait()
            self.recorded.append("over")


async def test_a_call_that_is_asked_again_while_it_is_given_up_begins_anew_once_it_is_over() -> None:
    ledger, first, second = CallLedger[str](), Reluctant(), Recorder()
    call = CallIdentity("call", b"call")
    await hung_up(ledger, call, first)
    await asyncio.sleep(0.01)
    again = [asyncio.create_task(ledger.run(call, second)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert (ledger.num_running, second.started) == (1, 0), "its chain is reserved until then"
    first.may_let_go.set()
    second.release.set()
    assert await asyncio.gather(*again) == ["answer", "answer"]
    assert (first.recorded, second.started, ledger.num_joined) == (["over"], 1, 1)


async def test_a_call_that_is_asked_again_while_its_session_ends_does_not_begin() -> None:
    ledger, first, second = CallLedger[str](), Reluctant(), Recorder()
    call = CallIdentity("call", b"call")
    await hung_up(ledger, call, first)
    await asyncio.sleep(0.01)
    again, end = asyncio.create_task(ledger.run(call, second)), asyncio.create_task(ledger.stop_all())
    await asyncio.sleep(0.01)
    first.may_let_go.set()
    with pytest.raises(ConflictError, match="session ended"):
        await again
    await end
    assert second.started == 0
