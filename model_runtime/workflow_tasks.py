"""What a rollout works on: the user's function, the task file, the order of the tasks, and what an earlier
life of the run has settled already."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from model_runtime.config import WorkflowConfig
from model_runtime.errors import ConfigError
from model_runtime.layout import RunLayout
from model_runtime.log_reader import WholeLog
from model_runtime.store import Store
from model_runtime.types import UNFINISHED_STATUSES

WorkflowFunction = Callable[[dict[str, Any], Any], Awaitable[float | None]]
"""`async def workflow(task, session) -> reward`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One line of a task file."""

    index: int  # position among the file's tasks
    line: bytes

    def fresh(self) -> dict[str, Any]:
        """The task as a dict of its own: a workflow may change it."""
        return msgspec.json.decode(self.line)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.line).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """One task in one pass over the task file: the executions that are compared with one another."""

    group_id: str
    task: Task


# ---------------------------------------------------------------- the user's function


def load_workflow(config: WorkflowConfig) -> WorkflowFunction:
    """Import `workflow.function`, its folder first on sys.path. Raises ConfigError saying what is missing."""
    if config.function is None:
        raise ConfigError("workflow.function is not set: write `module:async_function`")
    module_name, _, name = config.function.partition(":")
    module = _import(module_name, config.python_path)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"workflow.function: module {module_name!r} ({module.__file__}) has no {name!r}")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow.function: {config.function} must be an `async def` of (task, session)")
    try:
        inspect.signature(function).bind({}, None)
    except TypeError as error:
        raise ConfigError(
            f"workflow.function: {config.function} must take (task, session): {error}"
        ) from None
    return function


def _import(module_name: str, python_path: str | None) -> ModuleType:
    if python_path is not None:
        folder = str(Path(python_path).resolve())
        if not Path(folder).is_dir():
            raise ConfigError(f"workflow.python_path: {folder} is not a folder")
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
        _forget_if_elsewhere(module_name)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f" below {python_path}" if python_path else ""
        raise ConfigError(f"workflow.function: importing {module_name!r}{where}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"workflow.function: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error


def _forget_if_elsewhere(module_name: str) -> None:
    """Another run in this process may have imported its own module of this name."""
    loaded = sys.modules.get(module_name)
    if loaded is None:
        return
    del sys.modules[module_name]
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin == getattr(loaded, "__file__", None):
        sys.modules[module_name] = loaded


# ---------------------------------------------------------------- tasks


def read_tasks(path: str | Path, *, setting: str) -> list[Task]:
    """The tasks of a JSONL file; blank lines are passed over. Raises ConfigError naming each bad line."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} can't be read: {error.strerror}") from error
    tasks: list[Task] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            bad.append(f"{path}:{number}: not a JSON object: {error}")
        else:
            tasks.append(Task(len(tasks), line))
    if bad:
        more = [] if len(bad) <= 10 else [f"and {len(bad) - 10} more bad lines"]
        raise ConfigError(f"{setting}:\n  " + "\n  ".join([*bad[:10], *more]))
    if not tasks:
        raise ConfigError(f"{setting}: {path} holds no task")
    return tasks


def training_groups(tasks: Sequence[Task], *, epochs: int, shuffle: bool, seed: int) -> Iterator[TaskGroup]:
    """Every task once per pass. Order and ids depend on (seed, pass, tasks) alone, so that a resumed run
    finds its groups again; a task that was changed is another group."""
    for epoch in range(epochs):
        order = list(tasks)
        if shuffle:
            random.Random(f"{seed}-{epoch}").shuffle(order)
        for task in order:
            yield TaskGroup(f"e{epoch}-t{task.index}-{task.digest}", task)


def evaluation_groups(tasks: Sequence[Task]) -> list[TaskGroup]:
    """Every task once, in the file's order."""
    return [TaskGroup(f"held-out-t{task.index}-{task.digest}", task) for task in tasks]


# ---------------------------------------------------------------- what is done already


class PoisonTasks:
    """Tasks of which no execution is ever finished, pass after pass. Nothing of it is kept beside the logs:
    going through the groups in order finds it again."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._failed_in_a_row: Counter[int] = Counter()  # task → groups

    def note(self, task: Task, *, finished: bool, failed: bool) -> None:
        """A group of this task has settled. `finished`: one of its executions was; `failed`: one ended
        otherwise by its own doing. Where all are the infrastructure's fault, nothing is known of the task."""
        if finished:
            self._failed_in_a_row[task.index] = 0
        elif failed:
            self._failed_in_a_row[task.index] += 1

    def skips(self, task: Task) -> bool:
        return self._limit is not None and self._failed_in_a_row[task.index] >= self._limit


@dataclass(slots=True)
class Cursor:
    """Where an earlier life of this run stopped, as the models' logs tell it."""

    settled: set[tuple[str, int]] = field(default_factory=set)  # (group_id, member_index)
    finished: set[str] = field(default_factory=set)  # groups with an execution that was finished
    failed: set[str] = field(default_factory=set)  # groups with one that was not, by its own doing
    next_attempt: dict[tuple[str, int], int] = field(default_factory=dict)

    def missing(self, group_id: str, group_size: int) -> list[tuple[int, int]]:
        """(member_index, attempt) of the members still to run."""
        return [
            (index, self.next_attempt.get((group_id, index), 0))
            for index in range(group_size)
            if (group_id, index) not in self.settled
        ]


def read_cursor(store: Store, layout: RunLayout, model_ids: Sequence[str]) -> Cursor:
    """A member is done when every trainable model's log settles it; any other is issued again, under an
    attempt number no log has seen."""
    cursor = Cursor()
    settled_in: dict[tuple[str, int], set[str]] = defaultdict(set)
    for model_id in model_ids:
        for _, shard in WholeLog(store, layout.model(model_id)):
            for settlement in shard.settlements:
                key = (settlement.member.group_id, settlement.member.member_index)
                attempt = settlement.member.attempt + 1
                cursor.next_attempt[key] = max(attempt, cursor.next_attempt.get(key, 0))
                if settlement.is_final:
                    settled_in[key].add(model_id)
                if settlement.status == "finalized":
                    cursor.finished.add(settlement.member.group_id)
                elif settlement.status in UNFINISHED_STATUSES:
                    cursor.failed.add(settlement.member.group_id)
    cursor.settled = {key for key, models in settled_in.items() if len(models) == len(model_ids)}
    return cursor
