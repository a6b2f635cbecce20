"""Requests made from the gateway's own OpenAPI document, by its rules and against them.

Whatever comes, the answer is documented: its status, its shape, and no 5xx but the 503 that says when to ask
again. Sessions are open and models ready, so that what is well formed gets to be sampled and recorded.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode, openapi
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from model_runtime.config import StoreConfig
from model_runtime.store import open_store
from tests.gateway_harness import ADMIN_KEY, GatewayHarness, LiveSession, live_gateway, make_config

NUM_CASES = 600
NUM_MANY_CASES = 5_000
CHECKS: Any = [status_code_conformance, response_schema_conformance, content_type_conformance]
# Operations that end the run or replace a model's servers have a gateway of their own.
ON_ANOTHER_GATEWAY = ("/admin/desired", "/admin/models/{model_id}")
MIXED_KEYS = (*["own"] * 10, "admin", "another session's", "made up", "none")
CONTROL_KEYS = (*["admin"] * 8, "none", "made up")
PLAIN = {
    "messages",
    "input",
    "system",
    "instructions",
    "stream",
    "max_tokens",
    "max_output_tokens",
    "logprobs",
}
MIXED_SESSIONS = (*["training"] * 5, *["evaluation"] * 5, "settled", "as generated")


class Fuzzed:
    """Two gateways under requests of all kinds, the first kept able to answer those that are well formed."""

    def __init__(self, harness: GatewayHarness, another: GatewayHarness) -> None:
        self.harness, self.another = harness, another
        self.http = requests.Session()
        self.statuses: dict[str, Counter[int]] = {}
        self._groups = itertools.count()
        self._sessions: dict[str, LiveSession] = {}
        self._sessions["settled"] = self._open("evaluation")
        self._sessions["settled"].finalize(1.0)

    @property
    def num_cases(self) -> int:
        return sum(counts.total() for counts in self.statuses.values())

    def session(self, kind: str) -> LiveSession:
        """A settled session, or one of this kind that is open, whatever was done to the last one."""
        known = self._sessions.get(kind)
        if kind == "settled":
            assert known is not None
            return known
        open_ones = {session.session_id for session in self.harness.gateway.sessions}
        if known is None or known.session_id not in open_ones:
            known = self._sessions[kind] = self._open(kind)
        return known

    def _open(self, kind: str) -> LiveSession:
        group, mode = f"fuzz-{next(self._groups)}", "train" if kind == "training" else "eval"
        if mode == "train":
            self.harness.open_group(group, size=1)
        return self.harness.open_session(0, group, group_size=1, mode=mode)

    def send(self, case: Case, kind: str, key: str) -> None:
        """Send a case with this session and key in it, and judge the answer."""
        session = self.session("evaluation" if kind == "as generated" else kind)
        if kind != "as generated" and "session_id" in case.path_parameters:
            case.path_parameters["session_id"] = session.session_id
        another = case.path in ON_ANOTHER_GATEWAY
        base_url = self.another.url if another else self.harness.url
        response = case.call(base_url=base_url, session=self.http, headers=self._headers(session, key))
        label = f"{case.method} {case.path}"
        self.statuses.setdefault(label, Counter())[response.status_code] += 1
        assert response.status_code < 500 or response.status_code == 503, response.text
        if response.status_code == 503:
            assert float(response.headers["retry-after"][0]) > 0
        case.validate_response(response, checks=CHECKS)

    def _headers(self, session: LiveSession, key: str) -> dict[str, str]:
        keys = {
            "own": session.api_key,
            "admin": ADMIN_KEY,
            "another session's": self._sessions["settled"].api_key,
            "made up": "rk-\xe9\xff~",
            "none": "",
        }
        return {"Authorization": f"Bearer {keys[key]}"} if key != "none" else {}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    logger = logging.getLogger("gateway")
    logger.setLevel(logging.CRITICAL)
    config = make_config(max_chains_per_session=200, request_timeout_s=2.0, lease_s=3600.0)
    stores = [open_store(StoreConfig(url=str(tmp_path_factory.mktemp("store")))) for _ in range(2)]
    with live_gateway(stores[0], config=config) as harness, live_gateway(stores[1], config=config) as another:
        for gateway in (harness, another):
            gateway.defaults |= {model_id: {"limit": 10**6} for model_id in ("plan", "solve")}
            gateway.make_ready()
        yield Fuzzed(harness, another)
    logger.setLevel(logging.NOTSET)


def tuned(case: Case, data: st.DataObject) -> Case:
    """The same case, where it would otherwise nearly always end at a first check, or take its time."""
    values = case.path_parameters
    if "agent_id" in values:
        values["agent_id"] = data.draw(st.sampled_from(["planner", "searcher", values["agent_id"]]))
    if "model_id" in values:
        values["model_id"] = data.draw(st.sampled_from(["plan", "solve", values["model_id"]]))
        if isinstance(case.body, dict) and data.draw(st.booleans()):
            case.body = case.body | {"model_id": values["model_id"]}
    if not isinstance(case.body, dict):
        return case
    if case.path == "/groups":
        short = {"wait_s": 0, "group_size": 50}  # what is larger is only slower
        case.body = case.body | {
            k: v for k, v in short.items() if isinstance(case.body.get(k), int | float) and case.body[k] > v
        }
    if "/v1/" in case.path:
        named = {} if "agent_id" in values else {"model": "planner"}
        # With every field set, some are always refused.
        kept = case.body if data.draw(st.booleans()) else {k: case.body[k] for k in PLAIN & set(case.body)}
        case.body = kept | named
    return case


def fuzz(fuzzed: Fuzzed, operation: APIOperation, mode: GenerationMode, num_cases: int) -> None:
    """Send so many cases of one operation."""

    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking would resend for minutes
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def send(data: st.DataObject) -> None:
        case = tuned(data.draw(operation.as_strategy(mode)), data)
        keys = (
            ("admin", "admin", "admin", "none", "made up")
            if "control" in (operation.tags or ())
            else MIXED_KEYS
        )
        fuzzed.send(case, data.draw(st.sampled_from(MIXED_SESSIONS)), data.draw(st.sampled_from(keys)))

    send()


def fuzz_all(fuzzed: Fuzzed, num_cases: int) -> None:
    """At least so many cases over all operations, most where there is a body to vary."""
    document = fuzzed.harness.http.get("/openapi.json").json()
    operations = [result.ok() for result in openapi.from_dict(document).get_all_operations()]
    with_body = [operation for operation in operations if operation.body]
    share = -(-num_cases // (2 * len(with_body)))
    for operation in operations:
        if operation in with_body:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                fuzz(fuzzed, operation, mode, share)
        else:
            fuzz(fuzzed, operation, GenerationMode.POSITIVE, 10)


def test_every_answer_to_requests_of_all_kinds_is_documented(fuzzed: Fuzzed) -> None:
    fuzz_all(fuzzed, NUM_CASES)
    assert fuzzed.num_cases >= NUM_CASES
    answered = {label for label, statuses in fuzzed.statuses.items() if statuses[200]}
    assert answered == set(fuzzed.statuses), "an operation was never asked well enough to be answered"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_answer_to_thousands_of_requests_is_documented(fuzzed: Fuzzed) -> None:
    before = fuzzed.num_cases
    fuzz_all(fuzzed, NUM_MANY_CASES)
    assert fuzzed.num_cases - before >= NUM_MANY_CASES
