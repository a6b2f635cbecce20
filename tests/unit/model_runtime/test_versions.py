from __future__ import annotations

import asyncio

import pytest

from model_runtime.versions import VersionTracker


def test_committed_and_published_only_rise() -> None:
    versions = VersionTracker("m")
    versions.commit(3)
    versions.commit(2)
    versions.acknowledge(1)
    versions.acknowledge(0)
    assert (versions.committed, versions.published) == (3, 1)


def test_only_a_live_version_can_be_announced() -> None:
    versions = VersionTracker("m")
    with pytest.raises(ValueError, match="v0 is not live"):
        versions.announce(0)


def test_an_older_version_never_comes_back() -> None:
    versions = VersionTracker("m")
    for version in (0, 1):
        versions.add_live(version)
    versions.announce(1)
    with pytest.raises(ValueError, match="older than v1"):
        versions.announce(0)


async def test_waiting_for_a_version_ends_when_it_or_a_newer_one_is_published() -> None:
    versions = VersionTracker("m")
    first, third = asyncio.create_task(versions.get_version()), asyncio.create_task(versions.wait_for(3))
    await asyncio.sleep(0)
    versions.acknowledge(1)
    assert await first == 1
    assert not third.done()
    versions.acknowledge(4)
    assert await third == 4


def test_changes_are_told_and_repetitions_are_not() -> None:
    told = []
    versions = VersionTracker("m", on_change=lambda: told.append(1))
    versions.commit(0)
    versions.commit(0)
    versions.acknowledge(0)
    versions.acknowledge(0)
    assert len(told) == 2
