"""One model's slow sync behind the real gateway: another model's requests never wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sync_isolation import measure, summarize
from model_runtime.protocol import ADMIN_KEY_ENV
from model_runtime.workspace import HOME_ENV

pytestmark = pytest.mark.integration


async def test_requests_of_one_model_never_wait_while_another_syncs_slowly(
    vllm_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_KEY_ENV, "admin-key-of-the-test")
    monkeypatch.setenv(HOME_ENV, str(tmp_path / "home"))
    windows = await measure(tmp_path, pairs=1, window_s=4, concurrency=2)
    quiet, syncing = windows
    assert syncing.sync_s is not None
    assert syncing.sync_s >= 3  # the sync did span most of the window
    assert quiet.num_requests > 0
    assert syncing.num_requests > 0
    assert summarize(windows)["waited_s"] == 0.0  # not one call found its model not ready
