"""One model's process in the test of turns: publishes versions to a rollout server in memory.

python -m tests.turn_taker FOLDER MODEL_ID NUM_VERSIONS LOAD_S CONFIG_JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from model_runtime.adapters import write_version
from model_runtime.config import RunConfig, StoreConfig
from model_runtime.layout import RunLayout
from model_runtime.store import open_store
from model_runtime.synchronizer import ParameterSynchronizer
from model_runtime.versions import VersionTracker
from tasks.publish import publish
from tasks.staggering import make_limit
from tests.fake_servers import FakeReplica, make_adapter_files, make_canary

START_LIMIT_S = 120.0


class Runtime:
    """What the task `publish` asks of a model's runtime, over a real synchronizer."""

    def __init__(self, folder: Path, model_id: str, config: RunConfig, *, load_s: float) -> None:
        self.model_id, self.run_id, self.config = model_id, "run", config
        self.rows: list[dict[str, Any]] = []
        self.spans: list[tuple[float, float]] = []
        self._store = open_store(StoreConfig(url=str(folder / "store")))
        self._layout = RunLayout("run").model(model_id)
        replica = FakeReplica(f"{model_id}-0")
        replica.client.load_s = load_s
        self._synchronizer = ParameterSynchronizer(
            model=config.model(model_id),
            store=self._store,
            layout=self._layout,
            folder=folder / model_id,
            replicas=cast(Any, [replica]),
            versions=VersionTracker(model_id),
            record=self._record,
            flip=self._flip,
        )

    def commit(self, version: int) -> None:
        files = make_adapter_files(version)
        write_version(
            self._store,
            self._layout,
            files,
            version=version,
            step=version,
            epoch=1,
            canary=make_canary(files.weights),
        )

    async def until_servable(self) -> None:
        """Its server is always there."""

    async def publish(self, version: int, **columns: object) -> None:
        began = time.time()
        await self._synchronizer.publish(version, columns=columns)
        self.spans.append((began, time.time()))
        await self._synchronizer.unload_idle({})

    def _record(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))

    async def _flip(self, version: int) -> None:
        return None


def wait_for_all(place: Path, config: RunConfig) -> None:
    until = time.monotonic() + START_LIMIT_S
    while len(list(place.glob("*.ready"))) < len(config.models) and time.monotonic() < until:
        time.sleep(0.05)


def main() -> None:
    _, folder, model_id, num_versions, load_s, raw = sys.argv
    place, config = Path(folder), RunConfig.model_validate_json(raw)
    runtime: Any = Runtime(place, model_id, config, load_s=float(load_s))
    for version in range(int(num_versions)):
        runtime.commit(version)
    asyncio.run(make_limit(config))
    (place / f"{model_id}.ready").touch()
    wait_for_all(place, config)

    async def publish_all() -> None:
        for version in range(int(num_versions)):
            await publish.fn(runtime, version)

    asyncio.run(publish_all())
    document = {"rows": runtime.rows, "spans": runtime.spans}
    (place / f"{model_id}.json").write_text(json.dumps(document))


if __name__ == "__main__":
    main()
