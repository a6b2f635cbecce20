"""Evaluations of versions that are in the store: what is evaluated, what it came to, how it compares.

A *plan* is all that the outcome depends on; its digest names the evaluation, so the same plan is worked on
once, however often it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from model_runtime.adapters import latest_version, read_version, version_folder
from model_runtime.checkpoints import find_manifest
from model_runtime.config import ModelConfig, RunConfig
from model_runtime.config_section import Section
from model_runtime.coordinator import read_run
from model_runtime.documents import CheckpointDocument, Document
from model_runtime.errors import ConfigError, ObjectExistsError, ObjectNotFoundError
from model_runtime.layout import EVALUATION_INFIX, ModelLayout, RunLayout, number_in
from model_runtime.store import Store

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


Choice = Annotated[int, Field(title="number")] | Annotated[Literal["latest", "base"], Field(title="name")]
"""The titles are the tabs of the dashboard's form."""


class ModelVersion(Section):
    """Which weights of a model are evaluated."""

    model_id: str
    """Model of the run."""
    version: Choice = "latest"
    """A number; latest: the newest committed one; base: the model without an adapter."""


class EvaluationPlan(Document):
    """What an evaluation depends on."""

    run_id: str
    versions: dict[str, int | None]  # model_id → version; None: the base model
    function: str
    tasks_sha256: str
    samples_per_task: int
    temperature: float
    seed: int

    @property
    def evaluation_id(self) -> str:
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def is_of_base(self) -> bool:
        return all(version is None for version in self.versions.values())

    def same_work(self, other: EvaluationPlan) -> bool:
        """Do both differ in the versions alone, so that their figures can be compared?"""
        return self.model_copy(update={"versions": other.versions}) == other

    def named_versions(self) -> str:
        """`planner_model v12, solver_model base`."""
        return ", ".join(
            f"{model_id} {'base' if version is None else f'v{version}'}"
            for model_id, version in sorted(self.versions.items())
        )


class Estimate(BaseModel):
    """A mean over tasks and its 95 % confidence interval by the normal approximation; tasks are the
    independent draws, so samples of one task are averaged first."""

    model_config = ConfigDict(frozen=True)

    mean: float
    low: float
    high: float
    num_tasks: int


class EvaluationDocument(Document):
    """evaluations/plan-<id>.json: what one plan came to."""

    plan: EvaluationPlan
    executions: dict[str, int]  # status → executions
    reward: Estimate | None  # of the workflow; None: no execution gave one
    pass_at: dict[int, float] = Field(default_factory=dict)  # k → share of tasks solved by one of k samples
    agent_success: dict[str, float] = Field(default_factory=dict)
    task_rewards: dict[str, list[float]] = Field(default_factory=dict)  # each task → its finished executions'
    created_at: float
    duration_s: float
    where: Literal["store", "live"] = "store"  # servers of its own, or a run's while it trained


# ---------------------------------------------------------------- figures


def estimate(task_rewards: Mapping[str, Sequence[float]]) -> Estimate | None:
    """Mean and confidence interval over the tasks that have a reward."""
    means = [statistics.fmean(rewards) for rewards in task_rewards.values() if rewards]
    if not means:
        return None
    mean = statistics.fmean(means)
    half = Z_95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else 0.0
    return Estimate(mean=mean, low=mean - half, high=mean + half, num_tasks=len(means))


def difference(now: Mapping[str, Sequence[float]], before: Mapping[str, Sequence[float]]) -> Estimate | None:
    """How much more reward there is now, task by task over those both have: the same tasks are easy or hard
    for both, so the interval is narrower than that of two means."""
    common = [task for task, rewards in now.items() if rewards and before.get(task)]
    return estimate({t: [statistics.fmean(now[t]) - statistics.fmean(before[t])] for t in common})


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples solves a task (Chen et al. 2021, eq. 1)."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_rates(
    task_rewards: Mapping[str, Sequence[float]],
    *,
    samples_per_task: int,
    success_reward: float,
    unknown: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, … and all samples, a mean over the tasks. Samples without a reward count as not
    solved; those that `unknown` counts by task were not drawn, and a task with fewer than k is left out."""
    solved = {task: sum(r >= success_reward for r in rewards) for task, rewards in task_rewards.items()}
    drawn = {task: samples_per_task - unknown.get(task, 0) for task in task_rewards}
    powers = [2**i for i in range(samples_per_task.bit_length()) if 2**i < samples_per_task]
    rates = {
        k: [pass_at_k(drawn[task], n, k) for task, n in solved.items() if drawn[task] >= k]
        for k in (*powers, samples_per_task)
    }
    return {k: statistics.fmean(by_task) for k, by_task in rates.items() if by_task}


# ---------------------------------------------------------------- what is evaluated


def newest_run(store: Store, name: str) -> str:
    """The run of the config `name` that was touched last. Raises ConfigError when there is none."""
    found: list[tuple[float, str]] = []
    for run_id in store.children(""):
        if EVALUATION_INFIX in run_id:
            continue
        document = read_run(store, RunLayout(run_id))
        if document is not None and document.config.get("name") == name:
            found.append((document.updated_at, run_id))
    if not found:
        raise ConfigError(f"no run of the config {name!r} is in {store.url}; name one with run_id")
    return max(found)[1]


def make_plan(
    store: Store, config: RunConfig, *, run_id: str, wanted: Iterable[ModelVersion]
) -> EvaluationPlan:
    """The plan of evaluating these versions, every other model at its latest.

    Raises ConfigError for an unknown model, a version that is not committed, and a config without a workflow
    function or held-out tasks."""
    chosen: dict[str, Choice] = {choice.model_id: choice.version for choice in wanted}
    for model_id in chosen:
        config.model(model_id)
    workflow = config.workflow
    if workflow.function is None or workflow.held_out_tasks is None:
        raise ConfigError("an evaluation needs workflow.function and workflow.held_out_tasks, a JSONL file")
    try:
        tasks = Path(workflow.held_out_tasks).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"workflow.held_out_tasks: {error.filename} can't be read: {error.strerror}"
        ) from error
    return EvaluationPlan(
        run_id=run_id,
        versions={
            model.model_id: _version(store, run_id, model, chosen.get(model.model_id, "latest"))
            for model in config.models
        },
        function=workflow.function,
        tasks_sha256=hashlib.sha256(tasks).hexdigest(),
        samples_per_task=config.evaluation.samples_per_task,
        temperature=config.evaluation.temperature,
        seed=config.seed,
    )


def _version(store: Store, run_id: str, model: ModelConfig, wanted: Choice) -> int | None:
    if wanted == "base" or model.kind == "frozen":
        return None
    layout = RunLayout(run_id).model(model.model_id)
    newest = latest_version(store, layout)
    if wanted == "latest":
        if newest is None:
            raise ConfigError(f"run {run_id!r}, model {model.model_id!r}: no version is committed yet")
        return newest
    if not store.exists(layout.version_marker(wanted)):
        raise ConfigError(
            f"run {run_id!r}, model {model.model_id!r}: version {wanted} is not committed; "
            f"the newest is {newest}"
        )
    return wanted


def due_checkpoints(store: Store, config: RunConfig, *, run_id: str) -> list[ModelVersion]:
    """Versions of every n-th checkpoint of each model (`evaluation.every_checkpoints`) that no evaluation of
    the same work has had, the newest first. The store alone says which: however many were saved at once, and
    whoever heard of it, none is lost. One whose manifest is damaged is passed over."""
    layout = RunLayout(run_id)
    plan = make_plan(store, config, run_id=run_id, wanted=[]) if config.trainable_models else None
    done = [d for d in read_evaluations(store, layout) if plan is not None and d.plan.same_work(plan)]
    found: list[tuple[int, ModelVersion]] = []
    for model in config.trainable_models:
        place = layout.model(model.model_id)
        steps = nth_steps(store, place, config, model)
        whole = [c for step in steps if (c := find_manifest(store, place, step)) is not None]
        for checkpoint in not_evaluated(whole, model.model_id, done):
            due = ModelVersion(model_id=model.model_id, version=checkpoint.version)
            found.append((checkpoint.step, due))
    return [due for _, due in sorted(found, key=lambda pair: pair[0], reverse=True)]


def nth_steps(store: Store, layout: ModelLayout, config: RunConfig, model: ModelConfig) -> list[int]:
    """Steps of the checkpoints that are to be evaluated, the oldest first. Counted by steps, so that it does
    not matter which others are still there."""
    every = config.evaluation.every_checkpoints
    if every is None:
        return []
    steps = sorted(number_in(name) for name in store.children(layout.checkpoints()))
    due = [step for step in steps if step and step % (every * model.save_every) == 0]
    return [step for step in due if store.exists(layout.checkpoint_marker(step))]


def not_evaluated(
    checkpoints: Iterable[CheckpointDocument], model_id: str, done: Iterable[EvaluationDocument]
) -> list[CheckpointDocument]:
    """Those whose version is in none of `done`, one a version."""
    had, found = {document.plan.versions.get(model_id) for document in done}, []
    for checkpoint in checkpoints:
        if checkpoint.version not in had:
            had.add(checkpoint.version)
            found.append(checkpoint)
    return found


def frozen_config(store: Store, config: RunConfig, plan: EvaluationPlan, folder: Path) -> RunConfig:
    """The config with every model frozen at the plan's version; adapters are brought to `folder`."""
    models = []
    for model in config.models:
        version, adapter = plan.versions[model.model_id], model.adapter_path
        if model.kind == "trainable":
            adapter = None
        if version is not None:
            into = folder / model.model_id
            read_version(store, RunLayout(plan.run_id).model(model.model_id), version, into)
            adapter = str(version_folder(into, version))
        models.append(model.model_copy(update={"kind": "frozen", "adapter_path": adapter}))
    multi_model = config.multi_model.model_copy(update={"models": models})
    return config.model_copy(update={"multi_model": multi_model})


# ---------------------------------------------------------------- in the store


def read_evaluation(store: Store, layout: RunLayout, evaluation_id: str) -> EvaluationDocument | None:
    """What the plan of this id came to; None when nobody has worked on it."""
    key = layout.evaluation_of_plan(evaluation_id)
    try:
        return EvaluationDocument.parse(store.get(key), source=store.uri(key))
    except ObjectNotFoundError:
        return None


def read_evaluations(store: Store, layout: RunLayout) -> list[EvaluationDocument]:
    """All evaluations of a run, oldest first."""
    keys = [key for key in store.list(layout.evaluations()) if layout.is_evaluation_of_plan(key)]
    documents = [EvaluationDocument.parse(store.get(key), source=store.uri(key)) for key in keys]
    return sorted(documents, key=lambda document: document.created_at)


def write_evaluation(store: Store, layout: RunLayout, document: EvaluationDocument) -> EvaluationDocument:
    """Keep it. Of two that worked on one plan at once the first stands, and is returned."""
    evaluation_id = document.plan.evaluation_id
    try:
        store.put_if_absent(layout.evaluation_of_plan(evaluation_id), document.to_bytes())
    except ObjectExistsError:
        return read_evaluation(store, layout, evaluation_id) or document
    return document


def comparable(
    documents: Sequence[EvaluationDocument], plan: EvaluationPlan
) -> tuple[EvaluationDocument | None, EvaluationDocument | None]:
    """(of the base models, the last one before) among evaluations of the same work."""
    others = [d for d in documents if d.plan.same_work(plan) and d.plan != plan]
    base = next((d for d in others if d.plan.is_of_base), None)
    last = next((d for d in reversed(others) if not d.plan.is_of_base), None)
    return base, last
