"""Real processes, ended by real signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from model_runtime.errors import ProcessError
from model_runtime.processes import ChildProcess, free_port

FAMILY = """
import os, subprocess, sys, time
# A grandchild in the same group, and one that leaves the group and ignores SIGTERM.
near = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
far = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"],
    start_new_session=True,
)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {near.pid} {far.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end while its state is read
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def wait_until(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.02)


async def start_family(tmp_path: Path, *, grace_s: float = 0.5) -> tuple[ChildProcess, list[int]]:
    pids = tmp_path / "pids"
    child = await ChildProcess.start(
        [sys.executable, "-c", FAMILY, str(pids)], log_path=tmp_path / "family.log", grace_s=grace_s
    )
    await asyncio.to_thread(wait_until, pids.exists)
    return child, [int(pid) for pid in pids.read_text().split()]


async def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path):
    child = await ChildProcess.start(
        [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(7)"],
        log_path=tmp_path / "a" / "x.log",
    )
    assert await child.wait() == 7
    assert child.returncode == 7
    assert child.log_tail() == "one\ntwo"
    assert child.log_tail(1) == "two"


async def test_stdin_is_empty_and_the_command_leads_its_own_group(tmp_path):
    code = "import os, sys; print(repr(sys.stdin.read()), os.getpgid(0) == os.getpid() == os.getsid(0))"
    child = await ChildProcess.start([sys.executable, "-c", code], log_path=tmp_path / "x.log")
    assert await child.wait() == 0
    assert child.log_tail() == "'' True"


async def test_the_given_environment_is_the_whole_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("REPERTORY_TEST_SECRET", "x")
    code = "import os; print(os.environ.get('REPERTORY_TEST_SECRET'), os.environ['ONLY'], os.getcwd())"
    child = await ChildProcess.start(
        [sys.executable, "-c", code], log_path=tmp_path / "x.log", env={"ONLY": "y"}, cwd=tmp_path
    )
    assert await child.wait() == 0
    assert child.log_tail() == f"None y {tmp_path}"


async def test_stop_ends_every_descendant_even_those_that_left_the_group(tmp_path):
    child, pids = await start_family(tmp_path)
    assert child.pid == pids[0]
    await child.stop()
    assert child.returncode == -signal.SIGTERM
    assert not [pid for pid in pids if running(pid)]
    await child.stop()


async def test_stop_gives_the_command_its_grace(tmp_path):
    code = """
        import signal, sys, time
        def finish(*_):
            time.sleep(0.3); print("finished", flush=True); sys.exit(3)
        signal.signal(signal.SIGTERM, finish)
        print("ready", flush=True)
        time.sleep(600)
    """
    log = tmp_path / "x.log"
    child = await ChildProcess.start([sys.executable, "-c", textwrap.dedent(code)], log_path=log, grace_s=10)
    await asyncio.to_thread(wait_until, lambda: "ready" in child.log_tail())
    await child.stop()
    assert child.returncode == 3
    assert child.log_tail(1) == "finished"


async def test_what_a_killed_command_leaves_behind_is_ended(tmp_path):
    child, pids = await start_family(tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL
    assert not [pid for pid in pids if running(pid)]


async def test_a_killed_guardian_takes_the_command_and_its_group_along(tmp_path):
    child, (command, near, far) = await start_family(tmp_path)
    os.kill(child._guardian.pid, signal.SIGKILL)
    await asyncio.wait_for(child.wait(), 10)
    await asyncio.to_thread(wait_until, lambda: not running(command) and not running(near))
    os.kill(far, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_parent_that_dies_takes_child_and_grandchildren_along(tmp_path, number):
    pids_file = tmp_path / "pids"
    parent_code = f"""
        import asyncio, signal, sys, time
        from pathlib import Path
        from model_runtime.processes import ChildProcess
        # Ignored, it may be inherited from a shell that runs the tests in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        async def main():
            child = await ChildProcess.start(
                [sys.executable, "-c", {FAMILY!r}, {str(pids_file)!r}],
                log_path=Path({str(tmp_path / "family.log")!r}), grace_s=0.5,
            )
            await child.wait()
        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.DEVNULL,
    )
    wait_until(pids_file.exists)
    pids = [int(pid) for pid in pids_file.read_text().split()]
    assert all(running(pid) for pid in pids)
    parent.send_signal(number)
    parent.wait(10)
    wait_until(lambda: not any(running(pid) for pid in pids))


def test_a_child_outlives_the_thread_and_loop_that_started_it(tmp_path):
    started: list[ChildProcess] = []

    def start_in_a_thread() -> None:
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(asyncio.run(ChildProcess.start(argv, log_path=tmp_path / "x.log", grace_s=1)))

    thread = threading.Thread(target=start_in_a_thread)
    thread.start()
    thread.join()
    time.sleep(0.3)
    (child,) = started
    assert child.returncode is None
    assert running(child.pid)
    asyncio.run(child.stop())
    assert not running(child.pid)


TALKATIVE = """
import time
for number in range(10**9):
    print(number, "x" * 1000, flush=True)
    time.sleep(0.002)
"""


async def test_a_log_that_grows_too_large_begins_anew_and_the_one_before_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("REPERTORY_LOG_LIMIT_BYTES", "200000")
    monkeypatch.setenv("REPERTORY_LOG_LOOK_S", "0.1")
    log = tmp_path / "x.log"
    child = await ChildProcess.start([sys.executable, "-c", TALKATIVE], log_path=log, grace_s=1)
    try:
        before = tmp_path / "x.log.1"
        await asyncio.to_thread(wait_until, before.exists, 20.0)
        first = await asyncio.to_thread(before.read_bytes)
        await asyncio.to_thread(wait_until, lambda: before.read_bytes()[:9] != first[:9], 20.0)
        await asyncio.to_thread(wait_until, lambda: log.stat().st_size > 0, 20.0)
        assert log.stat().st_size < 4_000_000
    finally:
        await child.stop()
    lines = log.read_text().splitlines()
    assert lines
    assert all(line.split()[0].isdecimal() for line in lines[1:]), "written where the old one ended"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]


FULL_DISK = """
import errno, os
from model_runtime import guardian

write = os.write

def copy_file_range(source, target, count):
    write(target, os.pread(source, 3, 0))
    raise OSError(errno.ENOSPC, "No space left on device")

def write_nothing(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

os.copy_file_range = copy_file_range
guardian._bound_log(5000)
os.write(1, b"goes on" + bytes(5000))
os.write = write_nothing
guardian._bound_log(5000)
write(1, b"goes on")
"""


def test_a_log_that_a_full_disk_can_not_keep_is_cut_and_the_command_goes_on(tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(b"old" + bytes(5000))
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", FULL_DISK], stdout=output, stderr=output, check=True)
    assert log.read_bytes() == b"goes on"
    assert (tmp_path / "x.log.1").read_bytes() == b"the"


async def test_a_log_that_can_not_be_opened_is_named(tmp_path):
    (tmp_path / "x.log").mkdir()
    with pytest.raises(ProcessError, match=r"x\.log: .*Is a directory"):
        await ChildProcess.start([sys.executable, "-V"], log_path=tmp_path / "x.log")


async def test_a_program_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ProcessError, match="no-such-program"):
        await ChildProcess.start(["no-such-program"], log_path=tmp_path / "x.log")


async def test_a_cancelled_stop_still_stops(tmp_path):
    child, pids = await start_family(tmp_path, grace_s=0.5)
    stopping = asyncio.create_task(child.stop())
    await asyncio.sleep(0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await asyncio.wait_for(child.wait(), 10)
    assert not [pid for pid in pids if running(pid)]


def test_free_ports_differ_and_can_be_bound():
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(1024 <= port <= 65535 for port in ports)
