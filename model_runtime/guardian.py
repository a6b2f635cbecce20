"""Runs one command and makes sure that it, and all it starts, is gone when it should be.

A script of its own, run as `python -I -S guardian.py LIFELINE_FD GRACE_S LOG_BYTES LOOK_S COMMAND...` by
`processes.ChildProcess`. Standard library only: it must start in milliseconds and hold little memory.

LIFELINE_FD is one end of a socket pair. Its other end lives in the parent alone, so reading the end of
the stream means that the parent died (of whatever, SIGKILL too) or wants the command stopped. The command's
log begins anew once it has more than LOG_BYTES, which is looked at every LOOK_S seconds.
"""

import ctypes
import errno
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 1.0
AFTER_KILL_S = 5.0


def main() -> int:
    lifeline, grace_s, log_bytes, look_s = int(sys.argv[1]), *map(float, sys.argv[2:5])
    command = sys.argv[5:]
    os.set_inheritable(lifeline, False)
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphans below this process become its children instead of init's, so none can slip away.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup = _wake_on_signals()
    parent = os.getppid()
    child = _start(command, libc)
    os.write(lifeline, f"{child}\n".encode())
    statuses: dict[int, int] = {}
    looked_at = time.monotonic()
    while child not in statuses and _parent_holds(lifeline, wakeup, parent):
        _reap(statuses)
        if time.monotonic() - looked_at > look_s:
            _bound_log(log_bytes)
            looked_at = time.monotonic()
    _end_all(child, statuses, grace_s)
    return statuses.get(child, -signal.SIGKILL)


def _wake_on_signals() -> int:
    """A file descriptor that becomes readable at SIGCHLD and SIGTERM."""
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    # A terminal's Ctrl-C is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return readable


def _start(command: list[str], libc: ctypes.CDLL) -> int:
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        # Should the guardian itself be killed, the command goes with it. The guardian has one thread, so
        # the signal can't fire early.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guardian:
            os._exit(1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"can't run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _parent_holds(lifeline: int, wakeup: int, parent: int) -> bool:
    """Wait for something to happen. False: stop the command."""
    readable, _, _ = select.select([lifeline, wakeup], [], [], TICK_S)
    if lifeline in readable:
        return False
    if wakeup in readable and signal.SIGTERM in os.read(wakeup, 4096):
        return False
    # The stream doesn't end while a forked copy of a dead parent holds its other end.
    return os.getppid() == parent


def _bound_log(limit_bytes: float) -> None:
    """The output of the command is appended to a file that this process has as its own output too; so it can
    be copied away and cut to nothing while it is written to. What comes in between may be in neither. On a
    full disk only what fits is kept: a log that stayed would grow."""
    try:
        if os.fstat(1).st_size < limit_bytes:
            return
        path = os.readlink("/proc/self/fd/1")
        with open(path, "rb") as log, open(path + ".1", "wb") as before:
            while os.copy_file_range(log.fileno(), before.fileno(), 2**24):
                pass
        os.ftruncate(1, 0)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            os.ftruncate(1, 0)
            _note(f"the end of what was here is lost: {error.strerror}")
        else:
            _note(f"this log could not be begun anew: {error.strerror}")


def _note(line: str) -> None:
    """Into the log; a full disk, which takes no line, must not end this process and with it the command."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return


def _reap(statuses: dict[int, int]) -> bool:
    """Collect the children that ended, as subprocess's returncode. False: there are none left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = os.waitstatus_to_exitcode(status)


def _end_all(child: int, statuses: dict[int, int], grace_s: float) -> None:
    """SIGTERM to the command's group, then after the grace SIGKILL to every descendant."""
    _signal_all(child, statuses, signal.SIGTERM)
    _wait_for_none(statuses, grace_s)
    deadline = time.monotonic() + AFTER_KILL_S
    while _reap(statuses) and time.monotonic() < deadline:
        _signal_all(child, statuses, signal.SIGKILL)
        time.sleep(0.02)


def _signal_all(child: int, statuses: dict[int, int], number: int) -> None:
    if child not in statuses:
        _signal_group(child, number)
    # Without the command its group may be gone and its number in other hands.
    if child in statuses or number == signal.SIGKILL:
        for pid in _children():
            _signal(pid, number)


def _wait_for_none(statuses: dict[int, int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while _reap(statuses) and time.monotonic() < deadline:
        time.sleep(0.02)


def _children() -> list[int]:
    """Direct children. Killing them hands theirs to this process, so repeating it reaches everyone."""
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    after_name = file.read().rpartition(b")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(after_name[1]) == me:
                found.append(int(name))
    return found


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        _signal(group, number)  # it has not called setsid yet


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _exit_like(returncode: int) -> None:
    """End as the command ended: the parent reads the same exit code or signal."""
    if returncode >= 0:
        os._exit(returncode)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = -returncode
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    _exit_like(main())
