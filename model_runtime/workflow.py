"""RolloutDriver: runs a user's workflow over a task set, `group_size` executions a task, through the gateway.

The driver keeps no state of its own. What is done stands in the models' logs as settlements; a driver that
starts again issues exactly the members that are not settled there. One execution that fails settles itself
and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError, ConflictError, RunEndedError
from model_runtime.gateway_client import GatewayClient, open_http
from model_runtime.layout import RunLayout
from model_runtime.protocol import admin_key
from model_runtime.store import Store
from model_runtime.workflow_execution import SESSION_SLACK_S, Mode, OpenGroup, Tally, WorkflowExecutor
from model_runtime.workflow_session import ChatReply, WorkflowSession
from model_runtime.workflow_tasks import (
    Cursor,
    PoisonTasks,
    Task,
    TaskGroup,
    WorkflowFunction,
    evaluation_groups,
    load_workflow,
    read_cursor,
    read_tasks,
    training_groups,
)

__all__ = ["ChatReply", "DriverProgress", "DriverReport", "RolloutDriver", "WorkflowSession"]

logger = logging.getLogger(__name__)

GATEWAY_PATIENCE_S = 180.0  # how long the gateway may be away before the rollout fails


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverProgress:
    """How far the rollout is; given to the `progress` callback after every execution."""

    mode: Mode
    groups_total: int  # of an evaluation, which opens none: its executions
    groups_opened: int
    executions: dict[str, int]  # status → executions
    running: int
    mean_reward: float | None  # over all finalized executions so far
    skipped_tasks: tuple[int, ...] = ()  # by their place in the task file


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    """What a rollout did."""

    mode: Mode
    groups_total: int
    groups_opened: int
    groups_done_before: int  # settled by an earlier life of this run
    ended: bool  # the gateway takes no new work: every model is past its steps, or the run drains
    executions: dict[str, int]
    """How attempts ended: finalized, aborted, expired, infra, retried; `awaiting_reward`: finished, and
    settled by the gateway when its judges have answered; `lost`: a restarted gateway forgot the session and
    the member was tried again; `done_before`: settled or finished when this driver came to it;
    `unsettled`: the run stopped before."""
    mean_reward: float | None  # the workflow's, over finalized executions
    agent_success: dict[str, float]  # mean of each agent's `success` component over finalized executions
    task_rewards: dict[str, list[float]]
    """Of an evaluation: each of its groups → rewards of the executions that were finished."""
    errors: dict[str, int]  # what workflows raised, and how often
    num_calls: int  # model calls
    duration_s: float
    skipped_tasks: tuple[int, ...] = ()  # by their place in the task file
    task_unknown: dict[str, int] = field(default_factory=dict)
    """Group → executions that say nothing of the policy: the infrastructure failed, or a judge is awaited."""

    @property
    def num_executions(self) -> int:
        """However often each was tried."""
        return sum(n for status, n in self.executions.items() if status not in ("retried", "lost"))


class RolloutDriver:
    """Drives one pass of work: `train`, the task set in groups under the gateway's admission, or `eval`,
    every held-out task as `config.evaluation` says, outside of training.

    `run` returns when the tasks are done or the gateway says `ended`. It raises ConfigError for a workflow
    or task file that can't be used, and BackendUnavailableError when the gateway stays away; started again
    it goes on where the logs say it stopped.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str,
        gateway_url: str,
        store: Store,
        mode: Mode = "train",
        progress: Callable[[DriverProgress], None] | None = None,
        workflow: WorkflowFunction | None = None,
        versions: Mapping[str, int] = MappingProxyType({}),
        stop_signals: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    ) -> None:
        """`workflow` stands in for the function `config.workflow.function` names; `versions` answer an
        evaluation in place of the published ones; `stop_signals` are what a signal to this process raises,
        which ends the driver and is no failure of the workflow it comes in."""
        self._config = config.workflow
        self._models = [m.model_id for m in config.trainable_models]
        self._seed = config.seed
        self._call_timeout_s = config.gateway.request_timeout_s + SESSION_SLACK_S
        self._trusted_certificate = config.gateway.tls_certificate
        self._layout = RunLayout(run_id)
        self._gateway_url = gateway_url
        self._store = store
        self._store_patience_s = config.store.max_outage_s
        self._mode: Mode = mode
        self._progress = progress
        self._workflow = workflow
        self._versions = versions
        self._stop_signals = stop_signals
        self._slots = asyncio.Semaphore(self._config.max_concurrent_executions)
        self._evaluation = config.evaluation
        self._tally = Tally()
        self._groups_total = 0
        self._poison = PoisonTasks(self._config.max_task_failures)

    async def run(self) -> DriverReport:
        started = time.monotonic()
        workflow = self._workflow or load_workflow(self._config)
        groups = self._groups()
        samples = self._evaluation.samples_per_task if self._mode == "eval" else 1
        self._groups_total = len(groups) * samples
        if self._mode == "eval":
            self._tally.task_rewards = {group.group_id: [] for group in groups}
        failure: BaseException | None = None
        # Each execution holds one connection at a time; the rest is for the driver's own calls.
        async with open_http(
            max_connections=self._config.max_concurrent_executions + 8,
            trusted_certificate=self._trusted_certificate,
        ) as http:
            gateway = GatewayClient(
                self._gateway_url,
                http,
                admin_key=admin_key(),
                patience_s=GATEWAY_PATIENCE_S,
                store_patience_s=self._store_patience_s,
            )
            try:
                await self._drive(groups, self._executor(workflow, gateway))
            except BaseExceptionGroup as failures:
                failure = _first(failures)
        if failure is not None:  # outside of the handler, or it would be its own context
            raise failure
        return self._report(time.monotonic() - started)

    def _executor(self, workflow: WorkflowFunction, gateway: GatewayClient) -> WorkflowExecutor:
        return WorkflowExecutor(
            self._config,
            mode=self._mode,
            workflow=workflow,
            gateway=gateway,
            call_timeout_s=self._call_timeout_s,
            tally=self._tally,
            evaluation=self._evaluation,
            seed=self._seed,
            versions=self._versions,
            stop_signals=self._stop_signals,
        )

    def _groups(self) -> list[TaskGroup]:
        if self._mode == "eval":
            path, setting = self._config.held_out_tasks, "workflow.held_out_tasks"
        else:
            path, setting = self._config.tasks, "workflow.tasks"
        if path is None:
            raise ConfigError(f"{setting} is not set: name a JSONL file")
        tasks = read_tasks(path, setting=setting)
        if self._mode == "eval":
            return evaluation_groups(tasks)
        c = self._config
        return list(training_groups(tasks, epochs=c.epochs, shuffle=c.shuffle, seed=self._seed))

    # -------------------------------------------------------------- groups

    async def _drive(self, groups: list[TaskGroup], executor: WorkflowExecutor) -> None:
        async with asyncio.TaskGroup() as running:
            if self._mode == "eval":
                samples = self._evaluation.samples_per_task
                for group in groups:
                    opened = OpenGroup(group, samples)
                    for sample in range(samples):
                        running.create_task(self._execute(executor, opened, sample, 0))
                return
            cursor = await asyncio.to_thread(read_cursor, self._store, self._layout, self._models)
            await self._open_groups(groups, cursor, executor, running)

    async def _open_groups(
        self,
        groups: Iterable[TaskGroup],
        cursor: Cursor,
        executor: WorkflowExecutor,
        running: asyncio.TaskGroup,
    ) -> None:
        size = self._config.group_size
        for group in groups:
            missing = cursor.missing(group.group_id, size)
            before = {
                "finished": group.group_id in cursor.finished,
                "failed": group.group_id in cursor.failed,
            }
            if not missing:
                self._tally.groups_done_before += 1
                self._poison.note(group.task, **before)
                continue
            if len(missing) == size and self._poison.skips(group.task):
                self._skip(group.task)
                continue
            # The semaphore is first come, first served: passing it means that every member issued so far
            # has begun and one more could. Groups opened earlier would only grow stale.
            async with self._slots:
                pass
            settled = set(range(size)) - {index for index, _ in missing}
            opened = OpenGroup(group, size, settled=settled, **before)
            try:
                if self._tally.ended:
                    return
                await executor.open_group(opened)
            except RunEndedError:
                self._tally.ended = True
                return
            except ConflictError:  # the gateway settled it between reading the logs and now
                self._tally.groups_done_before += 1
                continue
            self._tally.groups_opened += 1
            for index, attempt in missing:
                running.create_task(self._execute(executor, opened, index, attempt))
            await asyncio.sleep(0)  # lets them queue for their slots

    async def _execute(self, executor: WorkflowExecutor, group: OpenGroup, index: int, attempt: int) -> None:
        async with self._slots:
            self._tally.running += 1
            try:
                await executor.settle_member(group, index, attempt)
                if len(group.settled) == group.size:
                    self._poison.note(group.group.task, finished=group.finished, failed=group.failed)
            except RunEndedError:
                self._tally.ended = True
                self._tally.executions["unsettled"] += 1
            finally:
                self._tally.running -= 1
        if self._progress is not None:
            self._progress(self._snapshot())

    def _skip(self, task: Task) -> None:
        if task.index not in self._tally.skipped_tasks:
            self._tally.skipped_tasks.add(task.index)
            logger.warning(
                "task %d of %s is skipped: none of its executions was finished in %s groups in a row "
                "(workflow.max_task_failures)",
                task.index,
                self._config.tasks,
                self._config.max_task_failures,
            )

    # -------------------------------------------------------------- reporting

    def _snapshot(self) -> DriverProgress:
        return DriverProgress(
            mode=self._mode,
            groups_total=self._groups_total,
            groups_opened=self._tally.groups_opened,
            executions=dict(self._tally.executions),
            running=self._tally.running,
            mean_reward=self._tally.mean_reward,
            skipped_tasks=tuple(sorted(self._tally.skipped_tasks)),
        )

    def _report(self, duration_s: float) -> DriverReport:
        tally = self._tally
        return DriverReport(
            mode=self._mode,
            groups_total=self._groups_total,
            groups_opened=tally.groups_opened,
            groups_done_before=tally.groups_done_before,
            ended=tally.ended,
            executions=dict(tally.executions),
            mean_reward=tally.mean_reward,
            agent_success={agent: sum(v) / len(v) for agent, v in sorted(tally.successes.items())},
            task_rewards={group: list(values) for group, values in (tally.task_rewards or {}).items()},
            errors=dict(tally.errors),
            num_calls=tally.num_calls,
            duration_s=duration_s,
            skipped_tasks=tuple(sorted(tally.skipped_tasks)),
            task_unknown=dict(tally.task_unknown),
        )


def _first(failures: BaseExceptionGroup) -> BaseException:
    """The first failure that is not a group: the others are mostly its consequences."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
