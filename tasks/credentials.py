"""Keys of the object store from a Prefect block, so that they stand neither in a config nor in parameters."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from prefect.blocks.system import Secret

from model_runtime.config import StoreConfig
from model_runtime.errors import ConfigError, PrefectError

CALL_LIMIT_S = 30.0


async def load_credentials(store: StoreConfig) -> None:
    """Put what `store.credentials_block` holds into this process's environment, which its children inherit.

    Raises ConfigError, without any value, for a block that is not there or holds something else.
    """
    name = store.credentials_block
    if name is None:
        return
    try:
        async with asyncio.timeout(CALL_LIMIT_S):
            held: Any = (await Secret.aload(name)).get()
    except ValueError as error:  # how Prefect says that there is none
        raise ConfigError(
            f"store.credentials_block: no Secret block {name!r} is on the Prefect server; make it on the "
            'page Blocks, with a JSON object: {"AWS_ACCESS_KEY_ID": …, "AWS_SECRET_ACCESS_KEY": …}'
        ) from error
    except TimeoutError as error:
        raise PrefectError(
            f"store.credentials_block: {name!r} could not be read in {CALL_LIMIT_S:g} s"
        ) from error
    names = sorted(held) if isinstance(held, dict) else None
    if not names or not all(n.startswith("AWS_") and isinstance(held[n], str) for n in names):
        raise ConfigError(
            f"store.credentials_block: {name!r} must hold a JSON object of AWS_… names and text values; "
            f"it holds {f'the names {names}' if names else f'a {type(held).__name__}'}"
        )
    os.environ.update(held)
