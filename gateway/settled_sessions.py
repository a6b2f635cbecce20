"""Answers of sessions that have ended, for clients that ask again, and whose key opens what."""

from __future__ import annotations

import hmac
from collections import OrderedDict

from gateway.journal import Forget, SessionJournal
from gateway.journal_events import SessionSettled, of_session
from model_runtime.errors import AuthenticationError
from model_runtime.protocol import FinalizeAnswer

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
        """How the session ended; None when it is not known to have. Raises AuthenticationError."""
        end = self._ends.get(session_id)
        if end is None:
            return None
        check_key(end.api_key, api_key, trusted=trusted)
        return _answer_of(end)

    def add(self, end: SessionSettled) -> FinalizeAnswer:
        """Remember an end that is in the journal, and let go of the oldest ones that are too many."""
        self._ends[end.session_id] = end
        while len(self._ends) > MAX_REMEMBERED:
            oldest, _ = self._ends.popitem(last=False)
            self._journal.write(Forget(of_session(oldest)))
        return _answer_of(end)


def _answer_of(end: SessionSettled) -> FinalizeAnswer:
    return FinalizeAnswer(
        session_id=end.session_id, status=end.status, num_rows=end.num_rows, num_refused=end.num_refused
    )
