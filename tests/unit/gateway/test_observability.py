"""What people and monitors see of a session: its state, its page, the counters, the log."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway import logs, settled_sessions, view
from gateway.logs import JsonLines, TextLines
from model_runtime.layout import RunLayout
from tests.fakes import make_trajectory
from tests.gateway_harness import ADMIN_KEY, RUN_ID, GatewayHarness, LiveSession

SECRET = "a-prompt-that-no-log-may-hold"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"


def two_turns(harness: GatewayHarness, question: str = "one plus one?", **fields: Any) -> LiveSession:
    session = harness.open_session(**fields)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": question}]
    answer = session.chat(asked).json()
    asked += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    second = session.chat([{k: m[k] for k in ("role", "content")} for m in asked]).json()
    session.post("reward", {"reward": 0.5, "request_id": second["request_id"]}).raise_for_status()
    session.post("reward", {"reward": 1.0, "agent_id": "planner"}).raise_for_status()
    session.post("reward", {"reward": 0.25}).raise_for_status()
    return session


def test_an_open_session_shows_its_conversations_versions_and_rewards(harness: GatewayHarness) -> None:
    session = two_turns(harness)
    url = f"/sessions/{session.session_id}"
    shown = harness.http.get(url, headers=session.headers).json()
    [chain] = shown["chains"]
    assert (shown["mode"], shown["rewards"]) == ("train", {"reward": 0.25})
    assert (chain["agent_id"], chain["model_id"], chain["train"]) == ("planner", "plan", True)
    assert chain["rewards"] == {"reward": 1.0}
    assert [turn["rewards"] for turn in chain["turns"]] == [{}, {"reward": 0.5}]
    assert {turn["version_max"] for turn in chain["turns"]} == {0}
    assert chain["num_sampled_tokens"] == sum(turn["num_tokens"] for turn in chain["turns"])
    assert harness.http.get(url, headers=harness.admin).json() == shown
    assert harness.http.get(url).status_code == 401


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_ended_session_shows_what_it_left_from_the_log(harness: GatewayHarness, mode: str) -> None:
    session = two_turns(harness, mode=mode)
    neighbour = harness.open_session(1, mode=mode)
    neighbour.chat("something else")
    url = f"/sessions/{session.session_id}"
    before = harness.http.get(url, headers=session.headers).json()
    page_before = harness.http.get(f"{url}/view", headers=session.headers).text
    neighbour.finalize(0.0)
    session.finalize()
    shown = harness.http.get(url, headers=session.headers).json()
    assert shown == before | {"status": "finalized"}
    page = harness.http.get(f"{url}/view", params={"key": session.api_key})
    assert page.text == page_before.replace("<dd>open</dd>", "<dd>finalized</dd>")
    assert harness.http.get(url, headers=neighbour.headers).status_code == 401
    assert harness.http.get(url, headers=harness.admin).json() == shown


def test_an_ended_session_without_trajectories_shows_why(harness: GatewayHarness) -> None:
    session = two_turns(harness)
    session.post("abort", {"status": "aborted", "reason": "the task was withdrawn"}).raise_for_status()
    url = f"/sessions/{session.session_id}"
    shown = harness.http.get(url, headers=session.headers).json()
    assert (shown["status"], shown["reason"], shown["chains"]) == ("aborted", "the task was withdrawn", [])
    page = harness.http.get(f"{url}/view", headers=session.headers).text
    assert "aborted: the task was withdrawn" in page
    assert "There is no recorded turn." in page


def test_what_is_known_no_more_is_said_clearly(
    harness: GatewayHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settled_sessions, "MAX_REMEMBERED", 1)
    first, second = two_turns(harness), harness.open_session(1)
    first.finalize()
    second.chat("x")
    second.finalize()
    forgotten = harness.http.get(f"/sessions/{first.session_id}", headers=first.headers)
    assert forgotten.status_code == 404
    assert "have ended since" in forgotten.json()["error"]["message"]
    for key in harness.store.list(RunLayout(RUN_ID).model("plan").log_writers()):
        harness.store.delete(key)
    gone = harness.http.get(f"/sessions/{second.session_id}", headers=second.headers)
    assert gone.status_code == 404
    assert "is finalized, and what it left is not in the log any more" in gone.json()["error"]["message"]


def test_the_page_opens_with_the_sessions_key_alone(harness: GatewayHarness) -> None:
    session, other = two_turns(harness), harness.open_session(1)
    url = f"/sessions/{session.session_id}/view"
    page = harness.http.get(url, params={"key": session.api_key})
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert harness.http.get(url, headers=session.headers).text == page.text
    assert session.api_key not in page.text
    assert harness.http.get(url, params={"key": other.api_key}).status_code == 401
    assert harness.http.get(url).status_code == 401


def test_the_page_escapes_what_agents_and_models_wrote(harness: GatewayHarness) -> None:
    harness.server.answers = [HOSTILE]
    session = two_turns(harness, HOSTILE)
    session.post("reward", {"reward": 1.0, "component": HOSTILE}).raise_for_status()
    session.post("reward", {"reward": 1.0, "component": HOSTILE, "agent_id": "planner"}).raise_for_status()
    url = f"/sessions/{session.session_id}/view"
    open_page = harness.http.get(url, headers=session.headers).text
    session.post("abort", {"reason": HOSTILE}).raise_for_status()
    for page in (open_page, harness.http.get(url, headers=session.headers).text):
        assert "<script" not in page
        assert "<img" not in page
        assert "&lt;img src=x onerror=alert(1)&gt;" in page
    # What was sampled is shown token by token: a tag may come in pieces, or be a token of its own.
    tokens = re.findall(r'title="logprob [^"]*">(.*?)</span>', open_page)
    assert unescape("".join(tokens)).count(HOSTILE) == 2
    assert not any("<" in token or ">" in token for token in tokens)


@pytest.fixture
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium is installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


def test_a_browser_shows_turns_roles_masks_and_shades(
    harness: GatewayHarness, chromium: Any, tmp_path: Path
) -> None:
    session = two_turns(harness, HOSTILE)
    page = chromium.new_page(viewport={"width": 1100, "height": 1000})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{harness.url}/sessions/{session.session_id}/view?key={session.api_key}")
    assert page.title() == f"Session {session.session_id}"
    assert page.locator("section.turn").count() == 2
    assert page.locator("section.context").count() == 2
    assert "user" in page.locator(".role").all_inner_texts()
    token = page.locator("section.turn pre span").first
    assert "logprob" in token.get_attribute("title")
    assert token.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert page.get_by_text("reward 0.5").count() == 1
    assert len(asked) == 1, "the page asks for nothing else"
    page.screenshot(path=os.environ.get("REPERTORY_SCREENSHOT") or str(tmp_path / "view.png"), full_page=True)


def test_tokens_and_latencies_are_counted_by_model_and_agent(harness: GatewayHarness) -> None:
    two_turns(harness)
    text = harness.http.get("/metrics").text
    labels = '{agent="planner",model="plan"}'
    for name in ("prompt_tokens_total", "sampled_tokens_total", "turn_seconds_count"):
        assert f"repertory_gateway_{name}{labels}" in text
    assert "repertory_gateway_open_sessions 1.0" in text


# ------------------------------------------------------------------ the log


def test_no_line_of_a_whole_exchange_holds_a_prompt_an_answer_or_a_key(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="gateway")
    caplog.handler.setFormatter(JsonLines())
    session = two_turns(harness, SECRET)
    session.chat([{"role": "user", "content": SECRET}], stop=SECRET)
    session.post("agents/planner/v1/messages", {"messages": [{"role": SECRET, "content": SECRET}]})
    harness.server.fail_next = [500, "drop"]
    session.chat(f"{SECRET} again")
    harness.http.post("/groups", json={"group_id": SECRET, "group_size": SECRET}, headers=harness.admin)
    harness.http.get("/admin/status", headers={"Authorization": f"Bearer {SECRET}"})
    session.finalize(1.0)
    assert "session ends: finalized" in caplog.text
    assert "prompt tokens" in caplog.text
    for secret in (SECRET, session.api_key, ADMIN_KEY, harness.server.api_key):
        assert secret not in caplog.text
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    turns = [line for line in lines if "prompt tokens" in line["message"]]
    assert turns
    assert all(line["session_id"] == session.session_id and line["request_id"] for line in turns)


def test_a_line_says_which_session_and_call_it_is_about() -> None:
    record = logging.LogRecord("gateway", logging.WARNING, "", 0, "it %s", ("broke",), None)
    logs.session_id.set("s-1")
    logs.request_id.set("r-2")
    line = json.loads(JsonLines().format(record))
    assert (line["message"], line["level"]) == ("it broke", "warning")
    assert (line["session_id"], line["request_id"]) == ("s-1", "r-2")
    assert TextLines().format(record).endswith("gateway: it broke session_id=s-1 request_id=r-2")


class _Letters:
    """One letter a token."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return ["x"] * len(ids)

    def special_token_id(self, text: str) -> int | None:
        return None


def test_a_page_stays_small_whatever_the_session_holds() -> None:
    rows = [
        make_trajectory(
            chain_index=index,
            mask=([0] * 50 + [1] * 50) * 300,
            prompt_ids=np.arange(view.MAX_CONTEXT_TOKENS, dtype=np.int32),
        )
        for index in range(20)
    ]
    page = view.page("Session s", [], [(row, _Letters()) for row in rows])
    assert page.count('<span class="p') <= view.MAX_SAMPLED_TOKENS + len(view._SHADES)
    assert page.count("x") < 2 * view.MAX_CONTEXT_TOKENS
    assert page.count("conversation") >= 20, "every conversation is named"
    assert page.count("tokens are left out") >= 19
    assert page.count("Later turns are left out") >= 19
