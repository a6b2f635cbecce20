"""Agents outside of the run: a program of its own that opens groups and sessions over HTTP.

    python drive.py RUN_ID      # beside `repertory up config.yaml --run-id RUN_ID`, from the same folder

Nothing here is Repertory's: httpx and OpenAI's client, on one task set for ever, until the run has ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

HERE = Path(__file__).resolve().parent
FORMS = {"how much is the {}?": "price", "where is the {}?": "aisle", "how heavy is the {}?": "weight"}
ITEMS = ("sofa", "lamp", "desk", "chair", "shelf", "rug", "mirror", "clock", "stove", "bed")
TASKS = [{"asked": f.format(i), "wanted": f"lookup({t}, {i})"} for i in ITEMS for f, t in FORMS.items()]
GROUP_SIZE = 8
ENDED = 410


def work(task: dict[str, str], session: dict[str, Any]) -> float:
    """One execution of the agents. They need the session's base URL and key, and nothing else."""

    def ask(agent: str, system: str, text: str) -> str:
        url = f"{session['base_url']}/agents/{agent}/v1"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        with openai.OpenAI(base_url=url, api_key=session["api_key"]) as client:
            answer = client.chat.completions.create(model=agent, messages=messages)
            return answer.choices[0].message.content or ""

    plan = ask("planner_agent", "plan the lookup", task["asked"])
    return float(ask("search_agent", "look it up", plan) == task["wanted"])


def execute(control: httpx.Client, group_id: str, index: int, task: dict[str, str]) -> str:
    """A session for one member of a group, from its opening to its reward; how it ended."""
    member = {"mode": "train", "group_id": group_id, "group_size": GROUP_SIZE, "member_index": index}
    try:
        session = control.post("/sessions", json=member).raise_for_status().json()
        own = {"Authorization": f"Bearer {session['api_key']}"}
        reward = work(task, session)
        end = httpx.post(f"{session['base_url']}/finalize", json={"reward": reward}, headers=own, timeout=60)
        return end.raise_for_status().json()["status"]
    except (httpx.TransportError, openai.APIConnectionError):  # clients wait for a gateway that only restarts
        return "the gateway had gone"
    except (httpx.HTTPStatusError, openai.APIStatusError) as error:
        if error.response.status_code == ENDED:
            return "the run had ended"
        raise


def open_group(control: httpx.Client, group_id: str) -> bool:
    """Wait for room, as long as it takes: training sets the pace. False once the run takes no more work."""
    while True:
        group = {"group_id": group_id, "group_size": GROUP_SIZE}
        try:
            answer = control.post("/groups", json=group).raise_for_status().json()
        except httpx.TransportError:
            return False
        if answer["status"] != "waiting":
            return answer["status"] == "open"


def control_url(run_id: str) -> str:
    """Of the run's control API, once it has one."""
    path = HERE / "runs" / run_id / "run.json"
    while True:
        url = json.loads(path.read_text())["gateway_url"] if path.exists() else None
        if url is not None:
            return url
        time.sleep(1)


def drive(url: str, key: str) -> list[str]:
    """How each execution ended."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as control, ThreadPoolExecutor(16) as pool:
        ends = []
        for number, task in enumerate(itertools.cycle(TASKS)):
            if not open_group(control, f"g{number}"):
                break
            ends += [pool.submit(execute, control, f"g{number}", i, task) for i in range(GROUP_SIZE)]
        return [end.result() for end in ends]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_id", help="the run that `repertory up` was given with --run-id")
    url = control_url(parser.parse_args().run_id)
    # The key of this folder's runs, unless you chose one.
    key = os.environ.get("REPERTORY_ADMIN_KEY") or Path(".repertory/admin_key").read_text()
    ends = drive(url, key)
    print(", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends))))


if __name__ == "__main__":
    main()
