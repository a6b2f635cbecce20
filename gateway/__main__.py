"""`python -m gateway`: one gateway process, stopped by SIGTERM within ten seconds."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvicorn
import uvloop

from gateway.app import Gateway, create_app
from model_runtime.config import RunConfig, StoreConfig
from model_runtime.errors import RepertoryError, SupersededError
from model_runtime.protocol import admin_key
from model_runtime.store import open_store

logger = logging.getLogger("gateway")

# Of the ten seconds: what running requests get to end by themselves. The ingestor's flush comes after.
REQUEST_GRACE_S = 4

EXIT_SUPERSEDED = 4  # uvicorn exits with 3 when it can't start


class GatewayServer(uvicorn.Server):
    """Stops taking groups the moment it is told to exit, and exits when its epoch is superseded."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: object) -> None:
        # Not super()'s: that raises the signal again at the end, and a clean stop would look like a crash.
        self._gateway.stopping.set()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return self._gateway.superseded is not None or await super().on_tick(counter)


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
    return parser.parse_args(argv)


def read_config(path: Path, store_url: str | None) -> RunConfig:
    config = RunConfig.model_validate_json(path.read_bytes())
    if store_url is None:
        return config
    store = StoreConfig.model_validate({**config.store.model_dump(), "url": store_url})
    return config.model_copy(update={"store": store})


async def serve(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.config, arguments.store_url)
    gateway = Gateway(
        config,
        run_id=arguments.run_id,
        store=await asyncio.to_thread(open_store, config.store),
        epoch=arguments.epoch,
        incarnation=arguments.incarnation,
        admin_key=admin_key(),
    )
    await gateway.check_epoch()
    server = GatewayServer(
        uvicorn.Config(
            create_app(gateway),
            host=arguments.host or config.gateway.host,
            port=arguments.port,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=REQUEST_GRACE_S,
            timeout_keep_alive=75,
        ),
        gateway,
    )
    await server.serve()
    if gateway.superseded is not None:
        raise gateway.superseded
    return 0 if server.started else 1


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
