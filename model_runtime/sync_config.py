"""How several models take turns in putting versions into service."""

from __future__ import annotations

from pydantic import Field

from model_runtime.config_section import Section


class SyncConfig(Section):
    """Weight syncs of all models of a run."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Models that load and verify a new version at once, by a global concurrency limit of Prefect's,
    `repertory-sync-<name>`. None: no limit."""
    max_wait_s: float = Field(default=30.0, ge=0, le=30)
    """Longest wait for a turn; then the sync goes on without, which its row says."""
