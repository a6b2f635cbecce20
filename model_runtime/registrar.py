"""Registrar: keeps a model's lease and binding at the gateway alive.

One task sends every renewal, so they arrive in the order of their sequence numbers: at once when something
changed, else every `renew_interval_s`. Flips are renewals like any other. When the gateway has been silent
for a lease, what the parent wants is read from the store instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from model_runtime.config import GatewayConfig
from model_runtime.coordinator import latest_epoch, read_desired
from model_runtime.documents import DesiredDocument, DesiredState
from model_runtime.errors import CorruptObjectError, PublishError, StoreError, SupersededError
from model_runtime.layout import RunLayout
from model_runtime.protocol import ModelRenewal, RenewalAnswer, admin_key
from model_runtime.store import Store
from model_runtime.versions import Changed

logger = logging.getLogger(__name__)

ATTEMPT_TIMEOUT_S = 2.0
MIN_SPACING_S = 0.1
STORE_READ_TIMEOUT_S = 30.0

_T = TypeVar("_T")


class Registrar:
    """Renews one model's lease. `compose(seq)` is asked for each renewal just before it is sent, so a
    renewal always says what is true now; `on_answer` gets it back with the gateway's answer, unless a newer
    life leads. `on_orders` is called when `desired` or `stop_reason` has changed."""

    def __init__(
        self,
        *,
        gateway_url: str,
        model_id: str,
        epoch: int,
        config: GatewayConfig,
        store: Store,
        layout: RunLayout,
        compose: Callable[[int], ModelRenewal],
        on_answer: Callable[[ModelRenewal, RenewalAnswer], None],
        on_orders: Callable[[], None],
    ) -> None:
        self._url = f"{gateway_url.rstrip('/')}/admin/models/{model_id}"
        self._headers = {"Authorization": f"Bearer {admin_key()}", "Content-Type": "application/json"}
        self._model_id = model_id
        self._epoch = epoch
        self._config = config
        self._store = store
        self._layout = layout
        self._compose = compose
        self._on_answer = on_answer
        self._on_orders = on_orders
        self._seq = 0
        self._due = asyncio.Event()
        self._changed = Changed()
        self._http: aiohttp.ClientSession | None = None
        self._heard_at = time.monotonic()
        self._last_trouble: str | None = None
        self._acknowledged: int | None = None
        self.last_answer: RenewalAnswer | None = None
        self.desired: DesiredState = "run"
        self.stop_reason: str | None = None
        self.superseded = False

    def changed(self) -> None:
        """Something a renewal tells has changed: send one now, at most one per MIN_SPACING_S."""
        self._due.set()

    async def run(self) -> None:
        """Send renewals until cancelled. Once the gateway or the store says stop, `stop_reason` says why;
        renewals go on, so that the gateway sees this runtime until it has closed."""
        while True:
            self._due.clear()
            if not await self.send() and self._silent_s() > self._config.lease_s:
                await self._ask_store()
            await asyncio.sleep(MIN_SPACING_S)
            await _within(self._pause_s(), self._due.wait())

    async def flip(self, version: int, *, timeout_s: float) -> None:
        """Wait until the gateway has acknowledged a renewal that publishes `version`, which `compose` must
        already say. Raises PublishError when it has not within `timeout_s`, though the renewals go on saying
        it, and SupersededError when a newer life leads."""
        self.changed()
        try:
            async with asyncio.timeout(timeout_s):
                while self._acknowledged is None or self._acknowledged < version:
                    if self.superseded:
                        raise SupersededError(f"{self._model_id}@v{version}: {self.stop_reason}")
                    await self._changed.wait()
        except TimeoutError:
            raise PublishError(
                f"{self._model_id}: v{version} is not acknowledged by {self._url} after {timeout_s:g} s"
                + (f" ({self._last_trouble})" if self._last_trouble else "")
            ) from None

    async def send(self) -> bool:
        """One renewal; whether the gateway answered it. The next one has a new sequence number and newer
        contents, so nothing is ever repeated."""
        self._seq += 1
        renewal = self._compose(self._seq)
        try:
            answer = await self._put(renewal)
        except (aiohttp.ClientError, TimeoutError, ValidationError, _Refused) as error:
            self._note_trouble(f"{type(error).__name__}: {error}".rstrip(": "))
            return False
        self._note_trouble(None)
        self._heard_at = time.monotonic()
        self._take(renewal, answer)
        return True

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _put(self, renewal: ModelRenewal) -> RenewalAnswer:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=ATTEMPT_TIMEOUT_S)
        async with self._http.put(
            self._url, data=renewal.model_dump_json(), headers=self._headers, timeout=timeout
        ) as response:
            body = await response.read()
            if response.status != 200:
                raise _Refused(f"{response.status} {body[:300].decode(errors='replace')}")
        return RenewalAnswer.model_validate_json(body)

    def _take(self, renewal: ModelRenewal, answer: RenewalAnswer) -> None:
        if answer.superseded or answer.epoch > self._epoch:
            self.stop(
                f"superseded: the gateway knows epoch {answer.epoch}, this runtime is of {self._epoch}",
                superseded=True,
            )
            return
        self.last_answer = answer
        self._acknowledged = renewal.published_version
        self._want(answer.desired, "asked by the parent")
        self._changed.notify()
        self._on_answer(renewal, answer)

    def _want(self, desired: DesiredState, why: str) -> None:
        if desired == "stop":
            self.stop(why)
        elif self.stop_reason is None and desired != self.desired:  # stop is sticky
            self.desired = desired
            self._on_orders()

    def stop(self, reason: str, *, superseded: bool = False) -> None:
        """Note that this runtime is to stop, and whether a newer life leads; the first reason counts."""
        self.superseded = self.superseded or superseded
        if self.stop_reason is None:
            logger.info("%s: stopping: %s", self._model_id, reason)
            self.desired = "stop"
            self.stop_reason = reason
        self._changed.notify()
        self._on_orders()

    async def wait_until_stopped(self) -> str:
        """Wait for, and return, the reason to stop."""
        while self.stop_reason is None:
            await self._changed.wait()
        return self.stop_reason

    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def _pause_s(self) -> float:
        """A gateway that did not answer is asked again sooner: it may just have been restarted."""
        if self._last_trouble is None:
            return self._config.renew_interval_s
        return min(self._config.renew_interval_s, 0.5)

    async def _ask_store(self) -> None:
        """What the parent wants, and whether a newer one leads, from the store."""
        try:
            found = await _within(STORE_READ_TIMEOUT_S, asyncio.to_thread(self._read_control))
        except (StoreError, CorruptObjectError) as error:
            logger.warning("%s: the gateway is silent and the store can't be read: %s", self._model_id, error)
            return
        if found is None:
            return
        epoch, desired = found
        if epoch > self._epoch:
            self.stop(
                f"superseded: epoch {epoch} leads this run, this runtime is of {self._epoch}", superseded=True
            )
        elif desired is not None and desired.epoch == self._epoch:
            self._want(desired.state, f"asked in the store: {desired.reason or desired.state}")

    def _read_control(self) -> tuple[int, DesiredDocument | None]:
        return latest_epoch(self._store, self._layout) or 0, read_desired(self._store, self._layout)

    def _note_trouble(self, trouble: str | None) -> None:
        """Log each kind of trouble once, not once per renewal."""
        if trouble is not None and self._last_trouble is None:
            logger.warning("%s: the gateway did not take a renewal: %s", self._model_id, trouble)
        elif trouble is None and self._last_trouble is not None:
            logger.info("%s: the gateway answers again", self._model_id)
        self._last_trouble = trouble


class _Refused(Exception):
    """The gateway answered a renewal with something other than 200."""


async def _within(seconds: float, work: Awaitable[_T]) -> _T | None:
    """The result of `work`, or None when it took longer."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return None
