"""Local folders of this machine: logs, adapter copies, mailboxes, open sessions. Nothing here is needed to
resume a run; what must survive is in the store."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from model_runtime.errors import ConfigError

HOME_ENV = "REPERTORY_HOME"
ONE_RUN_ENV = "REPERTORY_ONE_RUN"
"""Set where everything shares one machine: a second training run waits for, then refuses, its place."""


def home() -> Path:
    """$REPERTORY_HOME, else `.repertory` in the current folder."""
    return Path(os.environ.get(HOME_ENV) or ".repertory").resolve()


@contextmanager
def exclusive(name: str, *, refusal: str, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock `<home>/<name>.lock` as the only process of this machine. The lock is the kernel's: it
    goes when its process goes, however.

    Raises ConfigError with `refusal` and the holder's process id if it isn't free within `wait_s`.
    """
    with (_made(home()) / f"{name}.lock").open("a+") as file:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise ConfigError(f"{refusal} (held by process {holder})") from None
                time.sleep(0.2)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield


@dataclass(frozen=True, slots=True)
class Workspace:
    """Folders of one run on this machine; made on first use."""

    run_id: str

    @property
    def root(self) -> Path:
        return _made(home() / "work" / self.run_id)

    def logs(self) -> Path:
        """One file per process and attempt, never overwritten."""
        return _made(self.root / "logs")

    def adapters(self, model_id: str) -> Path:
        """Local copies of versions, `v<k>/`, as vLLM reads them."""
        return _made(self.root / model_id / "adapters")

    def session_journal(self, epoch: int) -> Path:
        """Open sessions of the gateway of this epoch; for its next process."""
        return _made(self.root / "sessions") / f"{epoch}.journal"

    def mailbox(self, model_id: str) -> Path:
        """The two files a runtime and its trainer speak through."""
        return _made(self.root / model_id / "mailbox")


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
