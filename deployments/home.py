"""What one machine remembers under $REPERTORY_HOME: the secret of its gateways, the runs it launched, and
which Prefect they are on. Nothing here is needed to resume a run; it saves typing store URLs."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pydantic import BaseModel

from deployments.terminal import command
from model_runtime.config import RunConfig
from model_runtime.errors import ConfigError
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.workspace import exclusive, home


class RunRecord(BaseModel):
    """A run this machine launched."""

    run_id: str
    config: RunConfig
    config_path: str | None = None
    api_url: str
    launched_at: float


class StackRecord(BaseModel):
    """The Prefect server and runner that stand now, and who holds them."""

    pid: int
    api_url: str
    run_id: str


def admin_key() -> str:
    """The key of this home's gateways: from the environment, else made once; only the owner can read it."""
    if os.environ.get(ADMIN_KEY_ENV):
        return os.environ[ADMIN_KEY_ENV]
    path = home() / "admin_key"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    return path.read_text().strip()


def exclusive_home() -> AbstractContextManager[None]:
    """One launcher per home at a time."""
    stack = standing_stack()
    stop = f"stop it (`{command()} stop {stack.run_id}`)" if stack is not None else "stop it"
    return exclusive(
        "up",
        refusal=f"{home()} is in use by another `repertory up`: {stop}, or set REPERTORY_HOME to another "
        "folder to run beside it",
    )


def remember_run(record: RunRecord) -> None:
    _write(home() / "runs" / f"{record.run_id}.json", record)


def recall_run(run_id: str) -> RunRecord:
    """Raises ConfigError naming the runs this home knows."""
    path = home() / "runs" / f"{run_id}.json"
    if not path.exists():
        known = [r.run_id for r in known_runs()]
        raise ConfigError(f"no run {run_id!r} in {home()}; runs here: {known or 'none yet'}")
    return RunRecord.model_validate_json(path.read_text())


def known_runs() -> list[RunRecord]:
    """Runs launched from this home, newest last."""
    records = [RunRecord.model_validate_json(p.read_text()) for p in (home() / "runs").glob("*.json")]
    return sorted(records, key=lambda record: record.launched_at)


@contextmanager
def announced_stack(record: StackRecord) -> Iterator[None]:
    """Let `status` and `stop` in other terminals find this launcher while it runs."""
    path = home() / "stack.json"
    _write(path, record)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def standing_stack() -> StackRecord | None:
    """The launcher that runs in this home now, if any."""
    path = home() / "stack.json"
    try:
        record = StackRecord.model_validate(json.loads(path.read_text()))
        os.kill(record.pid, 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return record


def new_run_id(name: str) -> str:
    """`<name>-<date>-<time>-<4 random letters>`: sorts by time, unlike any other."""
    letters = secrets.token_hex(2)
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{letters}"


def _write(path: Path, record: BaseModel) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_suffix(f".{os.getpid()}.tmp")
    temp.write_text(record.model_dump_json(indent=1))
    os.replace(temp, path)
