"""`python -m gateway`: one gateway process, stopped by SIGTERM within ten seconds."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway import logs
from gateway.app import Gateway, create_agents_app, create_app
from gateway.connection import bounded_protocol
from gateway.journal import remove_older_journals
from model_runtime.config import RunConfig, StoreConfig
from model_runtime.errors import ConfigError, RepertoryError, SupersededError
from model_runtime.gateway_config import GatewayConfig
from model_runtime.layout import RunLayout
from model_runtime.patient_store import PatientStore
from model_runtime.protocol import admin_key
from model_runtime.store import open_store
from model_runtime.workspace import Workspace

logger = logging.getLogger("gateway")

# Of the ten seconds: what running requests get to end by themselves. The ingestor's flush comes after.
REQUEST_GRACE_S = 4

EXIT_SUPERSEDED = 4  # uvicorn exits with 3 when it can't start


class Listener(uvicorn.Server):
    """One of the process's listeners. Signals are for the process as a whole."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gateway", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--config", required=True, type=Path, help="JSON file of the run's configuration")
    parser.add_argument("--store-url", help="overrides the configuration's store.url")
    parser.add_argument("--epoch", required=True, type=int)
    parser.add_argument(
        "--incarnation", required=True, type=int, help="this process's number within the epoch"
    )
    parser.add_argument("--host", help="overrides gateway.host")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument(
        "--admin-port",
        type=int,
        help="overrides gateway.admin_port; without either, the control API is served at --port too, "
        "which only loopback allows",
    )
    for name in ("--listen-fd", "--admin-listen-fd"):
        parser.add_argument(
            name,
            type=int,
            help="a socket inherited from the parent, bound to the port already; connections that come while "
            "no gateway runs wait in it for the next",
        )
    return parser.parse_args(argv)


def read_config(path: Path, store_url: str | None) -> RunConfig:
    config = RunConfig.model_validate_json(path.read_bytes())
    if store_url is None:
        return config
    store = StoreConfig.model_validate({**config.store.model_dump(), "url": store_url})
    return config.model_copy(update={"store": store})


async def serve(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, arguments.store_url)
    logs.set_up(config.gateway)
    admin_port = arguments.admin_port or config.gateway.admin_port
    journal = Workspace(arguments.run_id).session_journal(arguments.epoch)
    remove_older_journals(journal, arguments.epoch)
    store = await asyncio.to_thread(open_store, config.store)
    gateway = Gateway(
        config,
        run_id=arguments.run_id,
        store=store,
        epoch=arguments.epoch,
        incarnation=arguments.incarnation,
        admin_key=admin_key(),
        agents_url=None if admin_port is None else config.gateway.agents_url(arguments.port),
        journal=journal,
    )
    patient = PatientStore(store, max_outage_s=config.store.max_outage_s)
    await asyncio.to_thread(patient.exists, RunLayout(arguments.run_id).run())  # a start outlasts an outage
    await gateway.check_epoch()
    listeners = make_listeners(
        gateway,
        arguments.host or config.gateway.host,
        arguments.port,
        admin_port,
        inherited=(arguments.listen_fd, arguments.admin_listen_fd),
    )
    _stop_on_signals(gateway, [listener for listener, _ in listeners])
    await gateway.start()
    collect_garbage_rarely()
    try:
        await _serve_until_stopped(gateway, listeners)
    finally:
        await gateway.close()
    if gateway.superseded is not None:
        raise gateway.superseded
    return 0 if all(listener.started for listener, _ in listeners) else 1


def make_listeners(
    gateway: Gateway,
    host: str,
    port: int,
    admin_port: int | None,
    *,
    inherited: tuple[int | None, int | None] = (None, None),
) -> list[tuple[Listener, socket.socket]]:
    """The agents' listener and the control API's, or without `admin_port` one for both, on loopback alone.
    `inherited` are file descriptors of sockets the parent bound to the two ports.

    Raises ConfigError for an address that can't be listened on and files that are no certificate and key."""
    config = gateway.config.gateway
    if admin_port is None:
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"gateway.host is {host!r}: agents of a network must not reach the control API; "
                "give it a listener of its own with gateway.admin_port"
            )
        both = _listener(create_app(gateway), config, with_tls=True)
        return [(both, _bound("gateway.port", host, port, inherited[0]))]
    agents = _listener(create_agents_app(gateway), config, with_tls=True)
    control = _listener(create_app(gateway), config, with_tls=False)
    return [
        (agents, _bound("gateway.port", host, port, inherited[0])),
        (control, _bound("gateway.admin_port", config.admin_host, admin_port, inherited[1])),
    ]


def _listener(app: ASGIApp, config: GatewayConfig, *, with_tls: bool) -> Listener:
    options = uvicorn.Config(
        app,
        http=bounded_protocol(config.max_header_bytes),
        ws="none",
        lifespan="off",  # the gateway starts before its listeners and closes after them
        access_log=False,
        proxy_headers=False,
        log_config=None,
        timeout_graceful_shutdown=REQUEST_GRACE_S,
        timeout_keep_alive=75,
        ssl_certfile=config.tls_certificate if with_tls else None,
        ssl_keyfile=config.tls_key if with_tls else None,
    )
    try:
        options.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"gateway.tls_certificate {config.tls_certificate!r} with gateway.tls_key {config.tls_key!r}: "
            f"{error}"
        ) from error
    return Listener(options)


def _bound(setting: str, host: str, port: int, inherited_fd: int | None) -> socket.socket:
    if inherited_fd is not None:
        return socket.socket(fileno=inherited_fd)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"{setting}: {host}:{port} can't be listened on: {error}") from error
    return bound


def _stop_on_signals(gateway: Gateway, listeners: list[Listener]) -> None:
    def stop(number: int) -> None:
        for listener in listeners:
            listener.force_exit = gateway.stopping.is_set() and number == signal.SIGINT
        gateway.stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)


async def _serve_until_stopped(gateway: Gateway, listeners: list[tuple[Listener, socket.socket]]) -> None:
    """Until a signal or a newer epoch ends this gateway; then requests under way get their grace."""
    serving = [asyncio.create_task(listener.serve([bound])) for listener, bound in listeners]
    stopped = asyncio.create_task(gateway.stopping.wait())
    await asyncio.wait([*serving, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for listener, _ in listeners:
        listener.should_exit = True
    await asyncio.gather(*serving)


def collect_garbage_rarely() -> None:
    """Let the collector of cycles look at what is new, now and then, and not at all that was loaded.

    With Python's own settings it costs a quarter of a model call, and its rare passes over everything keep
    all sessions waiting. Sessions hold no cycles: they are freed by counting references."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return uvloop.run(serve(parse_arguments(sys.argv[1:] if argv is None else argv)))
    except SupersededError as error:
        logger.error("%s", error)
        return EXIT_SUPERSEDED
    except RepertoryError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
