"""Sections of a model's training beside its trainer and objective."""

from __future__ import annotations

from pydantic import Field

from model_runtime.config_section import Section


class ReplayConfig(Section):
    """Groups that were trained and may fill up a batch that came too late (async_training.max_wait_s). The
    objective's correction weighs them like any stale sample."""

    max_groups: int = Field(default=0, ge=0)
    """Groups kept. 0: no replay."""
    max_bytes: int = Field(default=256 * 2**20, ge=1)
    """Bytes of arrays kept."""
    max_age: int = Field(default=8, ge=0)
    """Versions a token may lag behind the last published one when it is trained again; in place of
    async_training.max_staleness, which bounds its first time."""
    max_reuses: int = Field(default=1, ge=1)
    """Times one group is trained again."""
