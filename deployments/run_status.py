"""`repertory status` and `repertory stop`: a run seen from another terminal."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deployments.home import RunRecord, admin_key, standing_stack
from deployments.live_view import live_table
from deployments.summary_view import disk_use, print_summary
from deployments.terminal import command
from model_runtime.coordinator import read_run
from model_runtime.documents import RunDocument
from model_runtime.errors import RunFailedError
from model_runtime.layout import RunLayout
from model_runtime.protocol import GatewayStatus
from model_runtime.store import open_store
from model_runtime.summary import RunSummary, read_summary, removed_log_bytes, usage
from tasks.gateway_admin import GatewayAdmin

STOP_LIMIT_S = 60.0


def list_runs(records: Sequence[RunRecord], console: Console, *, as_json: bool) -> None:
    """Every run launched from this home, newest last."""
    rows = [(record, _document(record)) for record in records]
    if as_json:
        listed = [
            {
                "run_id": r.run_id,
                "state": state_of(r, d),
                "store": r.config.store.url,
                "launched_at": r.launched_at,
            }
            for r, d in rows
        ]
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
        return
    if not rows:
        console.print("no run has been launched from here: `repertory up CONFIG` launches one")
        return
    table = Table()
    for column in ("run", "state", "epoch", "launched", "store"):  # ids are copied: never cut or broken
        table.add_column(column, no_wrap=column == "run", overflow="fold")
    for record, document in rows:
        launched = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.launched_at))
        epoch = str(document.epoch) if document else "–"
        table.add_row(record.run_id, state_of(record, document), epoch, launched, record.config.store.url)
    console.print(table)


def show_run(record: RunRecord, console: Console, *, as_json: bool) -> None:
    """One run: live from its gateway while it runs, else its summary."""
    document = _document(record)
    live = asyncio.run(_live(document)) if document and document.gateway_url else None
    summary = _summary(record)
    store, layout = open_store(record.config.store), RunLayout(record.run_id)
    used, removed = usage(store, layout), removed_log_bytes(store, layout)
    if as_json:
        shown = {
            "run_id": record.run_id,
            "state": state_of(record, document),
            "live": live.model_dump(mode="json") if live else None,
            "summary": summary.model_dump(mode="json") if summary else None,
            "store_bytes": used,
            "removed_log_bytes": removed,
        }
        sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    elif live is not None:
        ui_url = record.api_url.removesuffix("/api")
        console.print(live_table(live, run_id=record.run_id, started_at=record.launched_at, ui_url=ui_url))
        console.print(disk_use(used, removed_log_bytes=removed), highlight=False, soft_wrap=True)
    else:
        console.print(f"{record.run_id}: {state_of(record, document)}", highlight=False)
        if summary is not None:
            print_summary(console, summary)
        elif used:
            console.print(disk_use(used, removed_log_bytes=removed), highlight=False, soft_wrap=True)


def state_of(record: RunRecord, document: RunDocument | None) -> str:
    """`running` only while its launcher stands: a run whose machine went down says so in no document."""
    if document is None:
        return "not started"
    if document.state != "running":
        return document.state
    stack = standing_stack()
    elsewhere = stack is None or stack.run_id != record.run_id
    return "interrupted" if elsewhere else "running"


def stop_run(record: RunRecord, console: Console) -> None:
    """Cancel the run and wait until its flow runs are final. Raises RunFailedError if they take too long."""
    from deployments.prefect_client import PrefectApi

    async def stop() -> tuple[int, list[str]]:
        api = PrefectApi(record.api_url)
        if not await api.healthy():
            return 0, []
        asked = await api.cancel(record.run_id)
        left = await api.wait_until_none_active(record.run_id, limit_s=STOP_LIMIT_S)
        return asked, [run.name for run in left]

    asked, left = asyncio.run(stop())
    if left:
        raise RunFailedError(f"run {record.run_id}: not ended within {STOP_LIMIT_S:.0f} s: {', '.join(left)}")
    console.print(f"{record.run_id}: {'stopped' if asked else 'was not running'}", highlight=False)
    document = _document(record)
    if document is not None and document.state == "completed":
        return
    path = record.config_path or ""
    console.print(
        f"Go on with:\n  {command()} up {path} --resume {record.run_id}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _document(record: RunRecord) -> RunDocument | None:
    return read_run(open_store(record.config.store), RunLayout(record.run_id))


def _summary(record: RunRecord) -> RunSummary | None:
    return read_summary(open_store(record.config.store), RunLayout(record.run_id))


async def _live(document: RunDocument) -> GatewayStatus | None:
    assert document.gateway_url is not None
    gateway = GatewayAdmin(document.gateway_url, key=admin_key(), run_id=document.run_id)
    try:
        return await gateway.status()
    finally:
        await gateway.close()
