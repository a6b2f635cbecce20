"""The quickstart's workflow, with a witness: every `finalize` that was answered is written down, in a file
that no part of the run reads. What the witness saw answered has to be in the log in the end."""

from __future__ import annotations

import os
import sys
from typing import Any

import workflow as quickstart

from model_runtime.gateway_client import GatewayClient
from model_runtime.protocol import FinalizeAnswer

run = quickstart.run
_control = GatewayClient.control


async def _witnessed(self: GatewayClient, path: str, *args: Any, **kwargs: Any) -> Any:
    answer = await _control(self, path, *args, **kwargs)
    if isinstance(answer, FinalizeAnswer) and answer.status == "finalized":
        line = answer.model_dump_json() + "\n"
        descriptor = os.open(os.environ["CHAOS_WITNESS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    return answer


if GatewayClient.control is _control:
    GatewayClient.control = _witnessed
    print("finalized sessions are witnessed", file=sys.stderr)
