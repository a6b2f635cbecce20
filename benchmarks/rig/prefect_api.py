"""Prefect's API, for who needs an answer: on SQLite the server answers 503 when somebody wrote meanwhile."""

from __future__ import annotations

from typing import Any

import httpx
from tenacity import retry, retry_if_exception, stop_after_delay, wait_exponential_jitter

ATTEMPT_LIMIT_S, TOTAL_LIMIT_S = 15.0, 60.0


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, httpx.TransportError)


@retry(
    retry=retry_if_exception(_may_pass),
    wait=wait_exponential_jitter(multiplier=0.2, max=3.0),
    stop=stop_after_delay(TOTAL_LIMIT_S),
    reraise=True,
)
def ask(method: str, url: str, body: Any = None) -> Any:
    """The answer's JSON, None without one. What is asked must do no harm twice: what creates a flow run has
    an idempotency key. Raises httpx.HTTPError."""
    answer = httpx.request(method, url, json=body, timeout=ATTEMPT_LIMIT_S, trust_env=False)
    answer.raise_for_status()
    return answer.json() if answer.content else None
