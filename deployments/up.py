"""Launching one run and following it to its end, on a terminal or silently."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.home import admin_key, new_run_id
from deployments.live_view import clock, live_table, plain_line
from deployments.local import Launch
from deployments.terminal import console
from model_runtime.config import RunConfig
from model_runtime.coordinator import read_run
from model_runtime.errors import RepertoryError, RunFailedError
from model_runtime.layout import RunLayout
from model_runtime.protocol import GatewayStatus
from model_runtime.store import open_store
from model_runtime.summary import RunSummary, read_summary
from model_runtime.workspace import Workspace
from tasks.gateway import START_LIMIT_S
from tasks.gateway_admin import GatewayAdmin

T = TypeVar("T")

POLL_S = 1.0
PLAIN_EVERY_S = 5.0
PARENT_SILENT_LIMIT_S = 180.0
"""A parent that gave the gateway no sign of life for this long hangs."""
SUMMARY_LIMIT_S = 3600.0
"""Longest a parent takes, once its gateway has gone, to read the run's logs and write the summary."""
LONGEST_LOOK_S = 30.0
"""More than this between two looks, and this process itself stood still."""


class Interrupted(RepertoryError):
    """The user asked to stop; everything has been stopped."""


class View(Protocol):
    """What a run is shown on."""

    def say(self, line: str) -> None: ...
    def show(self, status: GatewayStatus | None, phase: str) -> None: ...


class TerminalView:
    """Progress lines, then a table that is redrawn; without a terminal, a line every few seconds."""

    def __init__(self, console: Console, *, run_id: str) -> None:
        self.ui_url = ""
        self._console = console
        self._run_id = run_id
        self._started_at = time.time()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._printed_at = 0.0
        self._last_phase = ""
        self._last_status: GatewayStatus | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the table as it stands; what is printed from now on comes below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, line: str) -> None:
        at = clock(time.time() - self._started_at)
        self._console.print(f"[dim]\\[{at}][/dim] {line}", highlight=False, soft_wrap=True)

    def show(self, status: GatewayStatus | None, phase: str) -> None:
        if self._live is not None:
            elapsed = clock(time.time() - self._started_at)
            # The gateway goes before the summary is made: what it last said stays on the screen.
            self._last_status = last = status if status and status.models else self._last_status
            self._live.update(self._table(last) if last else Text(f"{phase} · {elapsed}"), refresh=True)
        elif status is None or not status.models:
            if phase != self._last_phase:
                self._last_phase = phase
                self.say(phase)
        elif time.time() - self._printed_at > PLAIN_EVERY_S:
            self._printed_at = time.time()
            self._console.print(
                plain_line(status, started_at=self._started_at),
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _table(self, status: GatewayStatus) -> Any:
        return live_table(status, run_id=self._run_id, started_at=self._started_at, ui_url=self.ui_url)


async def run_to_end(
    launch: Launch, view: View, *, keep_until_interrupted: Callable[[RunSummary], None] | None = None
) -> RunSummary:
    """Start, follow, and end with the summary; whatever happens, nothing of it is left running.

    With `keep_until_interrupted` the summary is handed to it first, and Prefect stays up until Ctrl-C.

    Raises RunFailedError when the run failed or was cancelled from elsewhere. Cancelling this coroutine
    cancels the run first.
    """
    try:
        summary = await _run(launch, view)
        if keep_until_interrupted is not None:
            keep_until_interrupted(summary)
            await _until_cancelled()
        return summary
    finally:
        await launch.close()


async def _run(launch: Launch, view: View) -> RunSummary:
    try:
        await launch.start()
        if isinstance(view, TerminalView):
            view.ui_url = launch.stack.api.ui_url
        began = time.time()
        outcome = await follow(launch, view)
        summary = await asyncio.to_thread(_summary_since, launch, began)
    except asyncio.CancelledError:
        view.say("stopping: waiting for the run's processes to end")
        left = await launch.cancel()
        if left:
            view.say(f"not ended in time, ended by force: {', '.join(left)}")
        raise
    if summary is None or outcome is not None:
        raise RunFailedError(f"run {launch.run_id}: {outcome or 'it left no summary'}")
    return summary


async def _until_cancelled() -> None:
    """The run has ended as it should, so the Ctrl-C that ends this wait is no interruption of it."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def follow(launch: Launch, view: View) -> str | None:
    """Show the run until its parent flow run is final. None when it completed, else what happened."""
    assert launch.flow_run_id is not None, "start() comes first"
    gateway: GatewayAdmin | None = None
    silence = ParentSilence(launch)
    try:
        while True:
            await launch.stack.tend()
            state = await launch.stack.api.state(launch.flow_run_id)
            if state is not None and state.is_final():
                await launch.stack.api.wait_until_none_active(launch.run_id, limit_s=45)
                return None if state.is_completed() else f"{state.name}: {state.message or 'no message'}"
            gateway = await _gateway_of(launch, gateway)
            status = await gateway.status() if gateway else None
            runs = state is not None and state.is_running()
            silence.look(gateway.url if gateway else None, status, runs=runs)
            if silence.seconds > silence.limit_s:
                return await _end_hung_parent(launch, view, silence.seconds)
            phase = (state.name or "unknown").lower() if state else "waiting for Prefect"
            view.show(status, f"run {launch.run_id}: {phase}")
            await asyncio.sleep(POLL_S)
    finally:
        if gateway is not None:
            await gateway.close()


class ParentSilence:
    """How long the run's parent has shown no life, and how long it may.

    A gateway that has heard of it knows. Else the parent shows life by what it changes: the address in
    run.json, and the gateway's process, of which each has a log of its own. It may be at work all the same: a
    gateway that starts waits out an outage of the store, and at the run's end there is none. Time in which
    this process stood still, or the parent was not known to run, does not count.
    """

    def __init__(self, launch: Launch) -> None:
        self.seconds = 0.0
        self.limit_s = PARENT_SILENT_LIMIT_S
        self._launch = launch
        self._was_served = False
        self._traces: tuple[str | None, set[str]] = (None, set())
        self._at = time.monotonic()

    def look(self, url: str | None, status: GatewayStatus | None, *, runs: bool) -> None:
        """Note what run.json calls the gateway's address, and what the gateway says, now."""
        now = time.monotonic()
        passed_s, self._at = min(now - self._at, LONGEST_LOOK_S), now
        self._was_served = self._was_served or status is not None
        if status is not None and "parent" in status.heard_s:
            self.seconds, self.limit_s = status.heard_s["parent"], PARENT_SILENT_LIMIT_S
            return
        work_s = SUMMARY_LIMIT_S if self._was_served and url is None else START_LIMIT_S
        self.limit_s = PARENT_SILENT_LIMIT_S + work_s + self._launch.config.store.max_outage_s
        before, self._traces = self._traces, (url, self._gateway_lives())
        if self._traces != before:
            self.seconds = 0.0
        elif runs:
            self.seconds += passed_s

    def _gateway_lives(self) -> set[str]:
        logs = Workspace(self._launch.run_id).logs()
        return {path.name for path in logs.glob("gateway-[0-9]*-[0-9]*.log")}


async def _end_hung_parent(launch: Launch, view: View, silent_s: float) -> str:
    view.say(f"the run's parent has given no sign of life for {silent_s:.0f} s: ending it")
    left = await launch.cancel()
    if left:
        view.say(f"not ended in time, ended by force: {', '.join(left)}")
    return (
        f"its parent hung, without a sign of life for {silent_s:.0f} s, and was ended; nothing finalized is "
        f"lost, and `repertory up --resume {launch.run_id}` goes on"
    )


async def _gateway_of(launch: Launch, known: GatewayAdmin | None) -> GatewayAdmin | None:
    """The client of the gateway that run.json names now."""
    store, layout = open_store(launch.config.store), RunLayout(launch.run_id)
    try:
        run = await asyncio.to_thread(read_run, store, layout)
    except RepertoryError:
        return known  # the store is away for a moment; the parent sees to it
    url = run.gateway_url if run else None
    if known is not None and known.url == url:
        return known
    if known is not None:
        await known.close()
    return GatewayAdmin(url, key=admin_key(), run_id=launch.run_id) if url else None


def _summary_since(launch: Launch, began: float) -> RunSummary | None:
    summary = read_summary(open_store(launch.config.store), RunLayout(launch.run_id))
    return summary if summary is not None and summary.created_at >= began else None


def train(config: RunConfig, *, run_id: str | None = None, quiet: bool = False) -> RunSummary:
    """A whole run in one call: bring up Prefect and the runner, train, and return the summary.

    `run_id` of an earlier run goes on with it. Raises RunFailedError when the run failed, KeyboardInterrupt
    after a Ctrl-C; either way no process is left.
    """
    name = run_id or new_run_id(config.name)
    with TerminalView(console(stderr=True, quiet=quiet), run_id=name) as view:
        launch = Launch(config, name, view.say)
        try:
            return run_interruptible(lambda: run_to_end(launch, view))
        except Interrupted:
            raise KeyboardInterrupt from None


def run_interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` in an event loop. The first Ctrl-C (or SIGTERM, or a closed terminal) cancels it and waits
    for its cleanup, then Interrupted is raised; the second ends this process at once, and with it its
    children, whose guardians see to that."""
    return asyncio.run(_interruptible(work()))


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    loop, task, asked = asyncio.get_running_loop(), asyncio.ensure_future(work), 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            sys.stderr.write("\nforced: the remaining processes are being ended\n")
            sys.stderr.flush()
            os._exit(130)
        task.cancel()

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        raise Interrupted("stopped") from None
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
