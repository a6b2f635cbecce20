"""Local folders of this machine: logs, adapter copies, mailboxes. Nothing here is needed to resume a run;
what must survive is in the store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HOME_ENV = "REPERTORY_HOME"


def home() -> Path:
    """$REPERTORY_HOME, else `.repertory` in the current folder."""
    return Path(os.environ.get(HOME_ENV) or ".repertory").resolve()


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

    def mailbox(self, model_id: str) -> Path:
        """The two files a runtime and its trainer speak through."""
        return _made(self.root / model_id / "mailbox")


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
