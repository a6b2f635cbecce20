"""What does an evaluation beside a training run cost the training?

The quickstart's two policies on real vLLM, launched with `repertory up`, at learning rate 0: every window has
the same work. In every second window the deployment `evaluate` works on the held-out tasks through the run's
own gateway and servers, as it does on its schedule; a window lasts until its evaluation has ended, the one
after it as long. Windows alternate within one run: each with an evaluation has one without before and after.

    python -m benchmarks.evaluation_cost [--pairs 3] [--window-s 30] [--samples 16] [--json]

All is taken from what the run recorded: tokens trained on from the steps' rows, tokens sampled, for training
and for evaluations, from the log. Prints of each window how many of them there were a second and the
evaluation's share of the sampled ones. Fails when the tokens trained a second fall by more than that share
and MAX_BEYOND_SHARE, in the median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.rig.prefect_api import ask
from model_runtime.adapters import latest_version
from model_runtime.config_file import load_config
from model_runtime.evaluation import read_evaluations
from model_runtime.layout import ModelLayout, RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.store import Store, open_store
from model_runtime.trajectory_log import decode_shard
from tests.e2e.quickstart import write_config

MAX_BEYOND_SHARE = 0.10
RUN_ID = "evaluated"
LAYOUT = RunLayout(RUN_ID)
WARM_VERSIONS = 4  # beyond none
START_LIMIT_S = 240.0
EVALUATION_LIMIT_S = 300.0
STOP_LIMIT_S = 120.0
POLL_S = 0.25
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
REPOSITORY = Path(__file__).parents[1]
TRAINER = {"learning_rate": 0.0, "learning_rate_schedule": "constant", "warmup_steps": 0}


@dataclass(frozen=True, slots=True)
class Span:
    """Between two moments, with an evaluation at work in it or not."""

    evaluated: bool
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Window:
    evaluated: bool
    seconds: float
    trained_per_s: float  # tokens that updates were made on
    sampled_per_s: float  # tokens sampled for training
    share: float  # of all sampled tokens, the evaluation's


@dataclass(frozen=True, slots=True)
class Amount:
    """So many tokens, spread evenly over the time they took."""

    began: float
    ended: float
    tokens: float

    def within(self, span: Span) -> float:
        overlap = min(self.ended, span.ended) - max(self.began, span.began)
        if overlap <= 0:
            return 0.0
        return self.tokens * overlap / (self.ended - self.began)


# ---------------------------------------------------------------- the run


class LiveRun:
    """A training run under `repertory up`, and the Prefect it brought."""

    def __init__(self, folder: Path, config: Path, process: subprocess.Popen[bytes]) -> None:
        self.store: Store = open_store(load_config(config).store)
        self.models = [model.model_id for model in load_config(config).models]
        self._folder, self._process = folder, process

    def wait_for_versions(self, more: int) -> None:
        """So many more of each model; steps that are under way are recorded then."""
        wanted = {model_id: self._newest(model_id) + more for model_id in self.models}
        until = time.monotonic() + START_LIMIT_S
        while any(self._newest(model_id) < version for model_id, version in wanted.items()):
            self._require_alive()
            if time.monotonic() > until:
                raise SystemExit(f"not within {START_LIMIT_S:.0f} s: versions {wanted}")
            time.sleep(POLL_S)

    def quiet(self, seconds: float) -> Span:
        began = time.time()
        time.sleep(seconds)
        self._require_alive()
        return Span(False, began, time.time())

    def evaluate(self) -> Span:
        """From the moment the deployment is asked until its flow run has ended."""
        began = time.time()
        newest = [{"model_id": model_id, "version": "latest"} for model_id in self.models]
        parameters = {"run_id": RUN_ID, "versions": newest}
        wanted = {"parameters": parameters, "idempotency_key": f"{RUN_ID} {began}"}
        deployment = self._api("GET", "deployments/name/evaluate/quickstart")["id"]
        flow_run = self._api("POST", f"deployments/{deployment}/create_flow_run", wanted)["id"]
        while (state := self._api("GET", f"flow_runs/{flow_run}")["state"])["type"] not in FINAL:
            self._require_alive()
            if time.time() - began > EVALUATION_LIMIT_S:
                raise SystemExit(f"the evaluation had not ended after {EVALUATION_LIMIT_S:.0f} s")
            time.sleep(POLL_S)
        if state["type"] != "COMPLETED":
            raise SystemExit(f"the evaluation ended {state['name']}: {state['message']}")
        return Span(True, began, time.time())

    def _api(self, method: str, path: str, body: Any = None) -> Any:
        url = json.loads((self._folder / "home" / "stack.json").read_text())["api_url"]
        return ask(method, f"{url}/{path}", body)

    def _newest(self, model_id: str) -> int:
        version = latest_version(self.store, LAYOUT.model(model_id))
        return -1 if version is None else version

    def _require_alive(self) -> None:
        if self._process.poll() is not None:
            raise SystemExit("the run ended:\n" + (self._folder / "up.log").read_text()[-3000:])


@contextmanager
def live_run(folder: Path, *, samples: int) -> Iterator[LiveRun]:
    config = write_config(
        folder,
        model={"max_steps": None, "trainer": TRAINER},
        workflow={"epochs": 10_000},
        evaluation={"samples_per_task": samples, "temperature": 1.0},
    )
    env = os.environ | {"REPERTORY_HOME": str(folder / "home"), "COLUMNS": "200"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), env.get("PYTHONPATH"))))
    env.pop("PREFECT_API_URL", None)
    command = [sys.executable, "-m", "deployments.cli", "up", str(config), "--run-id", RUN_ID, "--no-ui"]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
    try:
        yield LiveRun(folder, config, process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_LIMIT_S)


def measure(folder: Path, *, pairs: int, window_s: float, samples: int) -> list[Window]:
    with live_run(folder, samples=samples) as run:
        run.wait_for_versions(WARM_VERSIONS)
        spans = [run.quiet(window_s)]
        for _ in range(pairs):
            spans.append(run.evaluate())
            spans.append(run.quiet(max(window_s, spans[-1].ended - spans[-1].began)))
        run.wait_for_versions(1)
    live = [document for document in read_evaluations(run.store, LAYOUT) if document.where == "live"]
    if len(live) != pairs:
        raise SystemExit(f"{len(live)} of {pairs} evaluations were worked on by the run itself")
    models = [LAYOUT.model(model_id) for model_id in run.models]
    trained = [amount for model in models for amount in trained_tokens(run.store, model)]
    sampled = [a for model in models for a in sampled_tokens(run.store, f"{model.root}/log")]
    of_evaluations = [a for model in models for a in sampled_tokens(run.store, model.eval_writers())]
    return [window_of(span, trained, sampled, of_evaluations) for span in spans]


# ---------------------------------------------------------------- what was recorded


def trained_tokens(store: Store, layout: ModelLayout) -> list[Amount]:
    """A step's tokens over the time since the step before it."""
    rows = read_metrics(store, layout, "steps")
    return [
        Amount(before["time"], row["time"], row["batch/num_trained_tokens"])
        for before, row in itertools.pairwise(rows)
    ]


def sampled_tokens(store: Store, prefix: str) -> list[Amount]:
    """Of each turn in the shards below `prefix`."""
    found = []
    for key in store.list(prefix):
        if not key.endswith(".parquet"):
            continue
        for row in decode_shard(store.get(key), source=store.uri(key)).trajectories:
            found += [Amount(t.started_at, t.ended_at, t.end - t.start) for t in row.turns]
    return found


def window_of(
    span: Span, trained: Sequence[Amount], sampled: Sequence[Amount], of_evaluations: Sequence[Amount]
) -> Window:
    seconds = span.ended - span.began
    num_trained, num_sampled, num_evaluated = (
        sum(amount.within(span) for amount in amounts) for amounts in (trained, sampled, of_evaluations)
    )
    return Window(
        evaluated=span.evaluated,
        seconds=seconds,
        trained_per_s=num_trained / seconds,
        sampled_per_s=num_sampled / seconds,
        share=num_evaluated / (num_sampled + num_evaluated),
    )


# ---------------------------------------------------------------- what it comes to


def drops(windows: Sequence[Window], what: str) -> list[float]:
    """Of each window with an evaluation: how far it falls below the mean of those around it."""
    found = []
    for before, evaluated, after in zip(windows[::2], windows[1::2], windows[2::2], strict=False):
        usual = (getattr(before, what) + getattr(after, what)) / 2
        found.append(1 - getattr(evaluated, what) / usual)
    return found


def result_of(windows: Sequence[Window]) -> dict[str, Any]:
    shares = [window.share for window in windows if window.evaluated]
    trained, sampled = drops(windows, "trained_per_s"), drops(windows, "sampled_per_s")
    beyond = [drop - share for drop, share in zip(trained, shares, strict=True)]
    return {
        "benchmark": "evaluation_cost",
        "windows": [asdict(window) for window in windows],
        "drops_of_trained": trained,
        "drops_of_sampled": sampled,
        "shares": shares,
        "beyond_share": beyond,
        "median_beyond_share": statistics.median(beyond),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="Training with and without an evaluation beside it")
    for head in ("window", "seconds", "trained tokens/s", "sampled for it/s", "evaluation's share", "drop"):
        table.add_column(head, justify="right")
    for i, window in enumerate(result["windows"]):
        evaluated = window["evaluated"]
        table.add_row(
            "evaluated" if evaluated else "training alone",
            *(f"{window[name]:.0f}" for name in ("seconds", "trained_per_s", "sampled_per_s")),
            f"{100 * window['share']:.1f} %",
            f"{100 * result['drops_of_trained'][i // 2]:.1f} %" if evaluated else "",
        )
    console.print(table)
    beyond, median = result["beyond_share"], result["median_beyond_share"]
    console.print(
        f"drop of trained tokens beyond the share: median {100 * median:+.1f} %, "
        f"range {100 * min(beyond):+.1f} to {100 * max(beyond):+.1f} %; at most {100 * MAX_BEYOND_SHARE:g} %"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=30.0, help="at least, of those without")
    parser.add_argument("--samples", type=int, default=16, help="executions of each held-out task")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evaluation-cost-") as folder:
        windows = measure(Path(folder), pairs=args.pairs, window_s=args.window_s, samples=args.samples)
    result = result_of(windows)
    print(json.dumps(result, indent=1)) if args.json else show(result, Console())
    return int(result["median_beyond_share"] > MAX_BEYOND_SHARE)


if __name__ == "__main__":
    sys.exit(main())
