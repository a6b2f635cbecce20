"""Which policy versions of a model exist, are live on its servers, and are published."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changed:
    """Wakes everybody who waits, whenever something changed.

    Look at the state first, then `wait()`: on one event loop nothing can change in between.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class VersionTracker:
    """The versions of one model, as its runtime knows them.

    committed   its marker is in the store
    live        loaded and verified on the ready servers
    announced   the version renewals tell the gateway to use, whether or not it has answered yet
    published   the version the gateway has acknowledged; what new requests use

    Announced and published only ever rise: a version number never comes back into service.
    """

    def __init__(self, model_id: str, *, on_change: Callable[[], None] | None = None) -> None:
        self.model_id = model_id
        self.committed: int | None = None
        self.announced: int | None = None
        self.published: int | None = None
        self._live: set[int] = set()
        self._changed = Changed()
        self._on_change = on_change

    @property
    def live(self) -> list[int]:
        return sorted(self._live)

    async def get_version(self) -> int:
        """The published version; waits for the first one."""
        return await self.wait_for(0)

    async def wait_for(self, version: int) -> int:
        """Wait until `version` or a newer one is published; returns the published one."""
        while self.published is None or self.published < version:
            await self._changed.wait()
        return self.published

    def commit(self, version: int) -> None:
        """A version is in the store. One older than the newest known changes nothing."""
        if self.committed is None or version > self.committed:
            self.committed = version
            self._notify()

    def add_live(self, version: int) -> None:
        self._live.add(version)
        self._notify()

    def remove_live(self, version: int) -> None:
        self._live.discard(version)
        self._notify()

    def announce(self, version: int) -> None:
        """Tell the gateway to use `version` from the next renewal on. Raises ValueError when it is not
        live, or older than the one announced."""
        if version not in self._live:
            raise ValueError(f"{self.model_id}: v{version} is not live; live are {self.live}")
        if self.announced is not None and version < self.announced:
            raise ValueError(f"{self.model_id}: v{version} is older than v{self.announced}, announced before")
        self.announced = version
        self._notify()

    def acknowledge(self, version: int) -> None:
        """The gateway uses `version` for new requests. An answer that comes late changes nothing."""
        if self.published is None or version > self.published:
            self.published = version
            self._notify()

    def _notify(self) -> None:
        self._changed.notify()
        if self._on_change is not None:
            self._on_change()
