"""Draws what a run of learn.yaml learned, from the metrics in its store.

    python curve.py RUN_ID      # writes learning.png, prints every fifth step

Every group that settled counts, also those that taught nothing because their executions were equal.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from model_runtime.config_file import load_config
from model_runtime.layout import RunLayout
from model_runtime.metrics import read_metrics
from model_runtime.store import open_store

HERE = Path(__file__).resolve().parent
MODEL_ID, AGENT_ID = "tool_model", "tool_agent"
REWARD = f"agent/{AGENT_ID}/reward/mean"
EVERY = 5


def read_steps(config_path: Path, run_id: str) -> list[dict[str, Any]]:
    """The rows of the steps that met a reward. Exits saying so when there is none."""
    store = open_store(load_config(config_path).store)
    rows = read_metrics(store, RunLayout(run_id).model(MODEL_ID), "steps")
    found = [row for row in rows if row.get(REWARD) is not None]
    if not found:
        raise SystemExit(f"{store.uri(run_id)} holds no step of {MODEL_ID}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: the mean over each stretch of steps, and when it ended."""
    began = rows[0]["time"] - rows[0]["timing_s/step"]
    lines = ["| steps | mean reward | answer, tokens | minutes |", "|---|---|---|---|"]
    for first in range(0, len(rows), EVERY):
        stretch = rows[first : first + EVERY]
        reward = sum(row[REWARD] for row in stretch) / len(stretch)
        length = sum(row["response_length/mean"] for row in stretch) / len(stretch)
        steps = f"{stretch[0]['step']}–{stretch[-1]['step']}"
        minutes = (stretch[-1]["time"] - began) / 60
        lines.append(f"| {steps} | {reward:.2f} | {length:.0f} | {minutes:.0f} |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3), dpi=90)
    axes.plot([row["step"] for row in rows], [row[REWARD] for row in rows], linewidth=1.5)
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_id", help="id of the run, as `repertory status` lists it")
    parser.add_argument("--config", type=Path, default=HERE / "learn.yaml", help="its config (learn.yaml)")
    parser.add_argument("--out", type=Path, default=HERE / "learning.png", help="picture to write")
    options = parser.parse_args()
    rows = read_steps(options.config, options.run_id)
    draw(rows, options.out)
    print(table(rows))


if __name__ == "__main__":
    main()
