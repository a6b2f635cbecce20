"""Where everything of a run stands in the store. The one place that spells these names.

<store>/<run_id>/
  run.json                                       global metadata: a copy of its newest revision
  summary.json                                   the run's result
  control/epoch-<n>.json  control/desired-<n>.json
  control/run-<n>.json                           revisions of run.json, the last two
  journal/<writer>/<seq>.bin                     finalized work on its way into the logs
  models/<model_id>/log/<writer>/<seq>.parquet   trajectories and settlements
  models/<model_id>/removed/<n>.bin              what is left of shards that retention removed
  models/<model_id>/eval/<writer>/<seq>.parquet  evaluation rows
  models/<model_id>/tokenizer/<sha256>.json      tokenizer and chat template the gateway renders with
  models/<model_id>/batches/<step>.json          what each step trained
  models/<model_id>/versions/v<k>/               adapter + VERSION.json, marker last
  models/<model_id>/checkpoints/step-<n>/        training state + MANIFEST.json, marker last
  models/<model_id>/metrics/<stream>/<epoch>-<incarnation>-<chunk>.jsonl
  snapshots/<n>.json                             one version per model
  evaluations/<epoch>.json                       the held-out tasks with the last versions
  evaluations/plan-<id>.json                     what the flow `evaluate` found, one file a plan
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EVALUATION_INFIX = ".eval-"
"""Between a run's id and an evaluation's, in the id of the run that works on it."""
VERSION_MARKER = "VERSION.json"
CHECKPOINT_MARKER = "MANIFEST.json"

# Sequence numbers are zero-padded so that listing order is numeric order.
_SEQ_DIGITS = 8


def writer_id(epoch: int, incarnation: int) -> str:
    """Name of one life of the gateway as a log writer; sorts in the order the lives began."""
    return f"e{epoch:05d}-{incarnation:05d}"


def parse_writer_id(writer: str) -> tuple[int, int]:
    """(epoch, incarnation) of a writer id. Raises ValueError for anything else."""
    match = re.fullmatch(r"e(\d{5,})-(\d{5,})", writer)
    if match is None:
        raise ValueError(f"not a writer id: {writer!r}")
    return int(match[1]), int(match[2])


def served_name(model_id: str, version: int) -> str:
    """The immutable name a policy version is served under, `<model_id>@v<version>`."""
    return f"{model_id}@v{version}"


def number_in(name: str) -> int:
    """The number at the end of `v12`, `step-12`, `epoch-12.json`, `00000012.parquet`."""
    match = re.search(r"(\d+)(?:\.[a-z]+)?$", name.rstrip("/"))
    if match is None:
        raise ValueError(f"no number in {name!r}")
    return int(match[1])


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Keys of one model, relative to the store's root."""

    root: str

    def log_writers(self) -> str:
        return f"{self.root}/log"

    def log_shard(self, writer: str, seq: int) -> str:
        return f"{self.root}/log/{writer}/{seq:0{_SEQ_DIGITS}d}.parquet"

    def removals(self) -> str:
        return f"{self.root}/removed"

    def removal(self, number: int) -> str:
        return f"{self.root}/removed/{number:0{_SEQ_DIGITS}d}.bin"

    def eval_shard(self, writer: str, seq: int) -> str:
        return f"{self.root}/eval/{writer}/{seq:0{_SEQ_DIGITS}d}.parquet"

    def eval_writers(self) -> str:
        return f"{self.root}/eval"

    def tokenizer(self, sha256: str) -> str:
        return f"{self.root}/tokenizer/{sha256}.json"

    def batches(self) -> str:
        return f"{self.root}/batches"

    def batch(self, step: int) -> str:
        return f"{self.root}/batches/{step:0{_SEQ_DIGITS}d}.json"

    def versions(self) -> str:
        return f"{self.root}/versions"

    def version(self, version: int) -> str:
        return f"{self.root}/versions/v{version}"

    def version_marker(self, version: int) -> str:
        return f"{self.version(version)}/{VERSION_MARKER}"

    def checkpoints(self) -> str:
        return f"{self.root}/checkpoints"

    def checkpoint(self, step: int) -> str:
        return f"{self.root}/checkpoints/step-{step}"

    def checkpoint_marker(self, step: int) -> str:
        return f"{self.checkpoint(step)}/{CHECKPOINT_MARKER}"

    def metrics(self, stream: str) -> str:
        return f"{self.root}/metrics/{stream}"

    def metrics_file(self, stream: str, epoch: int, incarnation: int, chunk: int = 0) -> str:
        return f"{self.root}/metrics/{stream}/{epoch:05d}-{incarnation:05d}-{chunk:05d}.jsonl"


def parse_log_shard(key: str) -> tuple[ModelLayout, str, int] | None:
    """(layout, writer, seq) of a key that `log_shard` made, whatever its run and model are called; None for
    any other."""
    match = re.fullmatch(r"(.+)/log/([^/]+)/(\d+)\.parquet", key)
    return None if match is None else (ModelLayout(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Keys of one run, relative to the store's root."""

    run_id: str

    def run(self) -> str:
        return f"{self.run_id}/run.json"

    def summary(self) -> str:
        return f"{self.run_id}/summary.json"

    def epochs(self) -> str:
        return f"{self.run_id}/control"

    def epoch(self, epoch: int) -> str:
        return f"{self.run_id}/control/epoch-{epoch}.json"

    def desired(self, seq: int) -> str:
        return f"{self.run_id}/control/desired-{seq}.json"

    def run_revision(self, number: int) -> str:
        return f"{self.run_id}/control/run-{number}.json"

    def journal_writers(self) -> str:
        return f"{self.run_id}/journal"

    def journal_entry(self, writer: str, seq: int) -> str:
        return f"{self.run_id}/journal/{writer}/{seq:0{_SEQ_DIGITS}d}.bin"

    def snapshots(self) -> str:
        return f"{self.run_id}/snapshots"

    def snapshot(self, number: int) -> str:
        return f"{self.run_id}/snapshots/{number:0{_SEQ_DIGITS}d}.json"

    def evaluations(self) -> str:
        return f"{self.run_id}/evaluations"

    def evaluation(self, epoch: int) -> str:
        return f"{self.run_id}/evaluations/{epoch:0{_SEQ_DIGITS}d}.json"

    def evaluation_of_plan(self, evaluation_id: str) -> str:
        return f"{self.run_id}/evaluations/plan-{evaluation_id}.json"

    def is_evaluation_of_plan(self, key: str) -> bool:
        return key.startswith(f"{self.evaluations()}/plan-")

    def evaluation_run(self, evaluation_id: str) -> str:
        """Id of the run that works on an evaluation: a folder of its own beside this run's."""
        return f"{self.run_id}{EVALUATION_INFIX}{evaluation_id}"

    def models(self) -> str:
        return f"{self.run_id}/models"

    def model(self, model_id: str) -> ModelLayout:
        return ModelLayout(f"{self.models()}/{model_id}")
