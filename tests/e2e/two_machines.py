"""Two machines and a network between them, on one: network namespaces behind a bridge. Needs root."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import pytest


def require_namespaces() -> None:
    """Skips where namespaces can't be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need `ip` (apt-get install iproute2)")
    probe = f"rp{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=30)
    if made.returncode:
        pytest.skip(f"network namespaces can't be made here: {made.stderr.strip()}")
    _ip("netns", "del", probe)


class Network:
    """Machines by name, each with an address of its own; this process is at `here`, on the bridge."""

    def __init__(self, *machines: str, subnet: str = "10.77.41") -> None:
        self.here = f"{subnet}.1"
        self.addresses = {name: f"{subnet}.{n}" for n, name in enumerate(machines, 2)}
        self._tag = f"rp{os.getpid()}"  # an interface's name has 15 characters at most
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        bridge = f"{self._tag}br"
        with self._undo:
            self._made(("link", "add", bridge, "type", "bridge"), undo=("link", "del", bridge))
            _ip("addr", "add", f"{self.here}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for name, address in self.addresses.items():
                self._join(name, address, bridge)
            self._undo = self._undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def on(self, name: str, *command: str) -> list[str]:
        """The command, to be run on this machine."""
        return ["ip", "netns", "exec", self._space(name), *command]

    def pull(self, name: str) -> None:
        """Take the machine off the network. What it does goes on; nothing reaches it or leaves it."""
        _ip("link", "set", self._cable(name), "down")

    def plug_in(self, name: str) -> None:
        _ip("link", "set", self._cable(name), "up")

    def _join(self, name: str, address: str, bridge: str) -> None:
        space, cable = self._space(name), self._cable(name)
        self._made(("netns", "add", space), undo=("netns", "del", space))
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", cable, "master", bridge)
        _ip("link", "set", cable, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
        ):
            _ip("-n", space, *command)

    def _made(self, command: tuple[str, ...], *, undo: tuple[str, ...]) -> None:
        _ip(*command)
        self._undo.callback(_ip, *undo)

    def _space(self, name: str) -> str:
        return f"{self._tag}{name}"

    def _cable(self, name: str) -> str:
        return f"{self._tag}{list(self.addresses).index(name)}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


class Passage:
    """A port at `host` that leads to another address: what listens on loopback alone, reached from a network.
    Bytes pass as they are."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listener = socket.create_server((host, 0), backlog=256)
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        self._server = await asyncio.start_server(self._pass, sock=self._listener)

    async def _close(self) -> None:
        self._server.close()
        mine = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _pass(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection(*self._target)
        except OSError:
            back.close()
            return
        try:
            await asyncio.gather(_pump(near, forth), _pump(far, back))
        finally:
            for writer in (forth, back):
                writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()
