"""Runs the quickstart while a seeded schedule kills and stops its processes and breaks its store, then checks
the books.

    python -m tests.chaos.driver --seeds 1 2 3 --faults 8
    python -m tests.chaos.driver --seeds 4 --roles prefect-database prefect-server --stop-s 60
    python -m tests.chaos.driver --seeds 4 --s3 env-file --roles store trainer gateway
    python -m tests.chaos.driver --seeds 4 --s3 env-file --roles store-daemon gateway \\
        --s3-daemons radosgw ceph-osd ceph-mon --s3-restart "start-the-store folder"

A store is behind a proxy that can be down, silent or slow, or refuses a tenth of what passes.
Exits with 1 when a run lost a finalized trajectory, trained one twice, gave a version's number to another
adapter, left a process behind, or did not complete.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from model_runtime.books import ModelBooks, read_books
from model_runtime.config import StoreConfig
from model_runtime.documents import VersionDocument
from model_runtime.errors import StoreError
from model_runtime.layout import RunLayout, number_in
from model_runtime.store import Store, open_store
from model_runtime.summary import RunSummary
from model_runtime.trajectory_log import decode_shard
from tests.chaos.store_faults import BreakableStore, store_of
from tests.chaos.victims import ENDS_THE_LAUNCH, OF_THINGS, ROLES, Fault, find, hit, schedule
from tests.e2e import quickstart
from tests.e2e.quickstart import below_the_bar
from tests.integration.test_prefect_lifecycle import QUICKSTART, Up
from tests.marked_processes import MARK

CHAOS = Path(__file__).parent
LAYOUT = RunLayout("run-1")
MODELS = ("planner_model", "solver_model")
VICTIM_LIMIT_S = 180.0
"""Longest wait for a process of a role to appear."""
RESUME_LIMIT_S = 120.0
"""Longest time a launch takes to end once what stands above it is gone."""


@dataclass(slots=True)
class Outcome:
    """What one run came to. `wrong`: what must not be."""

    seed: int
    faults: list[Fault] = field(default_factory=list)  # those that struck
    launches: int = 1
    duration_s: float = 0.0
    witnessed: int = 0
    finalized: int = 0
    trained: int = 0
    versions: int = 0
    lost: int = 0
    trained_twice: int = 0
    versions_reused: int = 0
    orphans: int = 0
    longest_pause_s: float = 0.0  # between two versions of a model, as seen in the store
    below_bar: list[str] | None = None  # None: this run was not to learn
    wrong: list[str] = field(default_factory=list)


class ChaosRun:
    """One run in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        max_steps: int,
        limit_s: float,
        breakable: BreakableStore,
        learns: bool = False,
    ) -> None:
        """`learns`: with the quickstart's own settings, and held against its bar."""
        self.folder, self.limit_s, self.learns = folder, limit_s, learns
        self.breakable, url = breakable, breakable.url
        self.outcome = Outcome(seed)
        self.began = time.monotonic()
        self._draw = random.Random(seed)
        write = write_learning_config if learns else write_config
        self._config = write(folder, max_steps=max_steps, store_url=url)
        self._witness = folder / "witness.jsonl"
        self._launches: list[Up] = []
        self._stopped: list[tuple[float, psutil.Process, Fault]] = []
        self._database: sqlite3.Connection | None = None
        self._database_free_at = 0.0
        self._versions: dict[tuple[str, int], str] = {}
        self._looked = 0.0
        self._newest_at: dict[str, float] = {}
        self.store: Store = open_store(StoreConfig(url=url))
        # A look at a store that is broken must not keep the driver from mending it in time.
        hasty = StoreConfig(url=url, max_attempts=1, read_timeout_s=2.0, operation_timeout_s=3.0)
        self._looking: Store = open_store(hasty)

    @property
    def up(self) -> Up:
        return self._launches[-1]

    # ------------------------------------------------------------------ the story

    def run(self, faults: list[Fault]) -> Outcome:
        try:
            self.launch()
            self.until_trained()
            for fault in faults:
                self.wait(fault.after_s)
                if self.up.process.poll() == 0:
                    break
                self.strike(fault)
            self.to_the_end()
            self.check()
        except AssertionError as error:
            self.outcome.wrong.append(str(error))
        finally:
            self.clean_up()
        self.outcome.duration_s = round(time.monotonic() - self.began, 1)
        return self.outcome

    def launch(self) -> None:
        mark = self._launches[0].mark if self._launches else uuid.uuid4().hex
        log = self.folder / f"up-{len(self._launches)}.log"
        env = os.environ | {
            MARK: mark,
            "REPERTORY_HOME": str(self.folder / "home"),
            "COLUMNS": "200",
            "CHAOS_WITNESS": str(self._witness),
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), str(QUICKSTART)]),
        }
        env.pop("PREFECT_API_URL", None)
        how = ["--resume", "run-1"] if self._launches else ["--run-id", "run-1"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments.cli", "up", str(self._config), *how],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
        self._launches.append(Up(process, mark, log, self.folder))
        self.outcome.launches = len(self._launches)

    def until_trained(self) -> None:
        while not all((model, 1) in self._versions for model in MODELS):
            self.tick()
            assert self.up.process.poll() is None, f"ended before it was hit:\n{self.up.output()[-3000:]}"

    def strike(self, fault: Fault) -> None:
        if fault.role in ("store", "store-daemon"):
            self.say(self.breakable.break_it(fault))
            self.outcome.faults.append(fault)
            return
        if fault.role == "prefect-database":
            self.lock_database(fault)
            return
        ends_it = fault.role in ENDS_THE_LAUNCH and fault.how != "SIGSTOP"
        while ends_it and self._stopped:  # stopped for as long as they are to be
            self.tick()
        until = time.monotonic() + VICTIM_LIMIT_S
        while (victim := find(self.up, fault.role, self._draw)) is None or not self.hit(victim, fault):
            self.tick()
            if self.up.process.poll() == 0:
                self.say(f"no {fault.role} to hit: the run is over")
                return
            assert self.up.process.poll() is None, f"`repertory up` ended:\n{self.up.output()[-2000:]}"
            assert time.monotonic() < until, f"there was no {fault.role} for {VICTIM_LIMIT_S:.0f} s"
        self.say(f"{fault} (pid {victim.pid})")
        self.outcome.faults.append(fault)
        if fault.how == "SIGSTOP":
            self._stopped.append((time.monotonic() + fault.stop_s, victim, fault))
        elif ends_it:
            self.after_the_end_of_a_launch()

    def hit(self, victim: psutil.Process, fault: Fault) -> bool:
        """False when it was gone already, or is stopped just now. A stop that ends early because what stands
        above it is killed counts for nothing."""
        if any(process == victim for _, process, _ in self._stopped):
            return False
        try:
            below = victim.children(recursive=True) if fault.how != "SIGSTOP" else []
        except psutil.Error:
            return False
        if not hit(victim, fault.how):
            return False
        for stop in [s for s in self._stopped if s[1] in below]:
            self.say(f"cut short: {stop[2]}")
            self._stopped.remove(stop)
            self.outcome.faults.remove(stop[2])
        return True

    def lock_database(self, fault: Fault) -> None:
        """Nobody else can write to Prefect's SQLite meanwhile."""
        self.unlock_database()
        self.say(str(fault))
        self._database = locked(self.folder / "home" / "prefect" / "prefect.db")
        self._database_free_at = time.monotonic() + fault.stop_s
        self.outcome.faults.append(fault)

    def unlock_database(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = None

    def after_the_end_of_a_launch(self) -> None:
        """Its processes all end by themselves; then the run is resumed."""
        until = time.monotonic() + RESUME_LIMIT_S
        while self.up.process.poll() is None and time.monotonic() < until:
            self.tick()
        assert self.up.process.poll() is not None, (
            f"`up` still runs {RESUME_LIMIT_S:.0f} s after its parent died"
        )
        if self.up.process.poll() == 0:
            return
        self.wake_all()
        self.nothing_left()
        self.say("resuming")
        self.launch()

    def to_the_end(self) -> None:
        for _ in range(8):
            while self.up.process.poll() is None:
                self.tick()
            if self.up.process.poll() == 0:
                break
            self.say(f"the launch ended with {self.up.process.poll()}")
            self.after_the_end_of_a_launch()
        assert self.up.process.poll() == 0, f"did not complete:\n{self.up.output()[-6000:]}"
        self.breakable.mend()
        self.nothing_left()

    # ------------------------------------------------------------------ meanwhile

    def wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.up.process.poll() != 0:
            self.tick()
            if self.up.process.poll() not in (None, 0):
                self.say(f"the launch ended with {self.up.process.poll()}")
                self.after_the_end_of_a_launch()

    def tick(self) -> None:
        assert time.monotonic() - self.began < self.limit_s, (
            f"not done within {self.limit_s:.0f} s:\n{self.up.output()[-3000:]}"
        )
        now = time.monotonic()
        for stop in [s for s in self._stopped if s[0] <= now]:
            self._stopped.remove(stop)
            hit(stop[1], "SIGCONT")
        self.breakable.tick()
        if self._database is not None and now > self._database_free_at:
            self.unlock_database()
        if now - self._looked > 1.0:
            self._looked = now
            self.look()
        time.sleep(0.2)

    def look(self) -> None:
        """Remember which adapter each version's number stands for."""
        try:
            for model_id in MODELS:
                layout = LAYOUT.model(model_id)
                for name in self._looking.children(layout.versions()):
                    number = number_in(name)
                    if (model_id, number) in self._versions or not self._looking.exists(
                        layout.version_marker(number)
                    ):
                        continue
                    data = self._looking.get(layout.version_marker(number))
                    document = VersionDocument.parse(data, source=f"v{number}")
                    self._versions[model_id, number] = document.sha256
                    self._note_pause(model_id, number)
        except StoreError:
            return  # it is broken on purpose

    def _note_pause(self, model_id: str, version: int) -> None:
        now = time.monotonic()
        if version > 1:  # v0 is there before training, v1 waits for servers to start
            pause_s = round(now - self._newest_at[model_id], 1)
            self.outcome.longest_pause_s = max(self.outcome.longest_pause_s, pause_s)
        self._newest_at[model_id] = now

    def wake_all(self) -> None:
        for _, process, _ in self._stopped:
            hit(process, "SIGCONT")
        self._stopped.clear()

    def nothing_left(self) -> None:
        until = time.monotonic() + 60
        while (left := self.up.marked()) and time.monotonic() < until:
            time.sleep(0.5)
        named = [" ".join(p.cmdline())[:150] for p in left if p.is_running()]
        self.outcome.orphans += len(named)
        assert not named, f"orphans: {named}"

    def say(self, what: str) -> None:
        print(f"  {time.monotonic() - self.began:6.1f} s  {what}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ the end

    def check(self) -> None:
        summary = RunSummary.model_validate_json(self.store.get(LAYOUT.summary()))
        wrong, answered = self.outcome.wrong, self.answered()
        self.outcome.witnessed = len(answered)
        for model in summary.models:
            layout = LAYOUT.model(model.model_id)
            sessions: dict[str, int] = {}

            def count(shard: Any, sessions: dict[str, int] = sessions) -> None:
                for row in shard.trajectories:
                    sessions[row.session_id] = sessions.get(row.session_id, 0) + 1

            books = read_books(self.store, layout, visit=count)
            for key in self.store.list(layout.eval_writers()):  # of the held-out tasks
                count(decode_shard(self.store.get(key), source=key))
            self.outcome.finalized += books.finalized
            self.outcome.trained += books.trained
            self.outcome.versions += (model.latest_version or 0) + 1
            self.outcome.trained_twice += books.num_trained_twice
            self.outcome.lost += books.num_missing
            if wrong_in(books):
                wrong.append(f"{model.model_id}: books {books}")
            if lost := missing_from(sessions, answered, model.model_id):
                self.outcome.lost += len(lost)
                wrong.append(f"{model.model_id}: finalized and not in the log: {lost}")
            for version in range((model.latest_version or 0) + 1):
                data = self.store.get(layout.version_marker(version))
                sha256 = VersionDocument.parse(data, source=f"v{version}").sha256
                if self._versions.get((model.model_id, version), sha256) != sha256:
                    self.outcome.versions_reused += 1
                    wrong.append(f"{model.model_id}: v{version} stood for two adapters")

        if self.learns:
            self.outcome.below_bar = below_the_bar(summary)

    def answered(self) -> dict[str, dict[str, int]]:
        if not self._witness.exists():
            return {}
        lines = (json.loads(line) for line in self._witness.read_text().splitlines())
        return {line["session_id"]: line["num_rows"] for line in lines}

    def clean_up(self) -> None:
        self.wake_all()
        self.breakable.mend()
        self.unlock_database()
        for up in self._launches:
            if up.process.poll() is None:
                up.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    up.process.wait(60)
                up.process.kill()
                up.process.wait()
        for process in self.up.marked():
            hit(process, "SIGKILL")


def locked(database: Path) -> sqlite3.Connection:
    """A connection that holds the only right to write, until it is closed."""
    connection = sqlite3.connect(database, timeout=30.0, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return connection


def wrong_in(books: ModelBooks) -> bool:
    """Is a row lost, trained twice, damaged, or in two places?"""
    return bool(
        not books.balanced or books.num_trained_twice or books.num_missing or books.num_damaged_shards
    )


def missing_from(
    in_log: Mapping[str, int], answered: Mapping[str, Mapping[str, int]], model_id: str
) -> dict[str, int]:
    """Sessions whose `finalize` was answered and of whose rows of this model the log lacks some."""
    promised = {session: rows.get(model_id, 0) for session, rows in answered.items()}
    return {session: rows for session, rows in promised.items() if in_log.get(session, 0) < rows}


def write_config(folder: Path, *, max_steps: int, store_url: str) -> Path:
    """The quickstart in small steps, with the witnessed workflow."""
    raw = yaml.safe_load((QUICKSTART / "config.yaml").read_text())
    for model in raw["multi_model"]["models"]:
        model["model_path"] = str(QUICKSTART / model["model_path"])
        model |= {"batch_size": 2, "max_steps": max_steps, "save_every": 2}
        # Small steps on small batches: a policy that collapses has no signal, and ends the run early.
        model["trainer"] |= {"learning_rate_schedule": "constant", "learning_rate": 5e-4}
    raw["workflow"] |= {
        "function": "witnessed:run",
        "tasks": str(QUICKSTART / "tasks/train.jsonl"),
        "python_path": str(CHAOS),
        "held_out_tasks": None,
        "group_size": 4,
        "epochs": 100,  # the run ends with its steps
        "max_concurrent_executions": 16,
    }
    raw["store"] = {"url": store_url}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def write_learning_config(folder: Path, *, max_steps: int, store_url: str) -> Path:
    """The quickstart as it is, with the witnessed workflow."""
    return quickstart.write_config(
        folder,
        model={"max_steps": max_steps},
        workflow={"function": "witnessed:run", "python_path": str(CHAOS), "epochs": 100},
        store={"url": store_url},
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--faults", type=int, default=8, help="of each run")
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=[*ROLES, *OF_THINGS])
    parser.add_argument("--hows", nargs="+", default=["SIGKILL", "SIGKILL", "SIGTERM", "SIGSTOP"])
    parser.add_argument("--stop-s", type=float, default=20.0, help="how long a stop or a broken store lasts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=900.0, help="of each run")
    parser.add_argument("--s3", type=Path, help="env file of a real S3 endpoint")
    parser.add_argument("--s3-daemons", nargs="+", default=[], help="names of its server's processes")
    parser.add_argument("--s3-restart", default="", help="command that brings back those that were killed")
    parser.add_argument(
        "--folder", type=Path, help="kept; else a temporary one, kept when something is wrong"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a driver that is ended ends what it started
    outcomes = []
    for seed in args.seeds:
        base = args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
        folder = base / f"seed-{seed}"
        folder.mkdir(parents=True)
        faults = schedule(seed, args.faults, roles=args.roles, hows=args.hows, stop_s=args.stop_s)
        print(f"seed {seed}: {', '.join(map(str, faults))}\n  in {folder}", file=sys.stderr, flush=True)
        with store_of(folder, args.s3, seed, daemons=args.s3_daemons, restart=args.s3_restart) as store:
            run = ChaosRun(folder, seed, max_steps=args.steps, limit_s=args.limit_s, breakable=store)
            outcomes.append(run.run(faults))
        print(json.dumps(asdict(outcomes[-1]), indent=1), flush=True)
    bad = [o.seed for o in outcomes if o.wrong]
    print(
        f"{len(outcomes)} runs, {sum(len(o.faults) for o in outcomes)} faults; wrong: {bad or 'none'}",
        flush=True,
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
