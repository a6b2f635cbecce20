"""The ledger of a session's calls."""

from __future__ import annotations

import asyncio

from gateway.calls import MAX_REMEMBERED, REMEMBERED_FOR_S, CallIdentity, CallLedger


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def identity(name: str) -> CallIdentity:
    return CallIdentity(name, name.encode())


async def answer(ledger: CallLedger[str], name: str, text: str) -> str:
    async def work() -> str:
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

    async def slow() -> str:
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
