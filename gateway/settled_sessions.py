"""Sessions that have ended: their answers, for clients that ask again, what they left, and whose key opens
what."""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict

from gateway.journal import Forget, SessionJournal
from gateway.journal_events import SessionSettled, of_session
from model_runtime.errors import AuthenticationError, ObjectNotFoundError, UnknownSessionError
from model_runtime.protocol import FinalizeAnswer
from model_runtime.store import Store
from model_runtime.trajectory_log import decode_shard
from model_runtime.types import Trajectory

MAX_REMEMBERED = 20_000


def check_key(expected: str, given: str, *, trusted: bool) -> None:
    """Raises AuthenticationError unless the key is right or the caller has shown the admin key."""
    if not trusted and not hmac.compare_digest(expected.encode(), given.encode()):
        raise AuthenticationError("the API key is missing or belongs to another session")


class SettledSessions:
    """The last ones to end. What is forgotten here leaves the journal too."""

    def __init__(self, journal: SessionJournal) -> None:
        self._journal = journal
        self._ends: OrderedDict[str, SessionSettled] = OrderedDict()

    def answer(self, session_id: str, api_key: str, *, trusted: bool) -> FinalizeAnswer | None:
        """What its end is answered with; None when it is not known to have one. Raises
        AuthenticationError."""
        end = self.end(session_id, api_key, trusted=trusted)
        return None if end is None else _answer_of(end)

    def end(self, session_id: str, api_key: str, *, trusted: bool) -> SessionSettled | None:
        """How the session ended; None when it is not known to have. Raises AuthenticationError."""
        end = self._ends.get(session_id)
        if end is not None:
            check_key(end.api_key, api_key, trusted=trusted)
        return end

    def add(self, end: SessionSettled) -> FinalizeAnswer:
        """Remember an end that is in the journal, and let go of the oldest ones that are too many."""
        self._ends[end.session_id] = end
        while len(self._ends) > MAX_REMEMBERED:
            oldest, _ = self._ends.popitem(last=False)
            self._journal.write(Forget(of_session(oldest)))
        return _answer_of(end)


class SettledRecords:
    """What ended sessions left, read from the logs again: nothing of it stays in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading = asyncio.Semaphore(1)  # a shard has some megabytes

    async def trajectories(self, end: SessionSettled) -> list[Trajectory]:
        """Raises StoreError, and UnknownSessionError when the log holds them no more."""
        async with self._reading:
            try:
                return await asyncio.to_thread(self._read, end)
            except ObjectNotFoundError as error:
                raise UnknownSessionError(
                    f"session {end.session_id} is {end.status}, and what it left is not in the log any more: "
                    f"{error}"
                ) from None

    def _read(self, end: SessionSettled) -> list[Trajectory]:
        shards = [decode_shard(self._store.get(key), source=key) for key in end.rows_in]
        rows = [row for shard in shards for row in shard.trajectories if row.session_id == end.session_id]
        return sorted(rows, key=lambda row: (row.agent_id, row.chain_index))


def _answer_of(end: SessionSettled) -> FinalizeAnswer:
    return FinalizeAnswer(
        session_id=end.session_id, status=end.status, num_rows=end.num_rows, num_refused=end.num_refused
    )
