"""Other gateways in front of the same rollout server."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from benchmarks.rig.processes import Measured, start_command, start_python, wait_until_up
from model_runtime.processes import free_port


async def start_pass_through(stack: ExitStack, upstream: str) -> tuple[Measured, str]:
    """The least a Python gateway can do. Returns its process and where to send chats."""
    port = free_port()
    process = start_python(stack, serve_pass_through, port, upstream, measured=True)
    await wait_until_up(f"http://127.0.0.1:{port}/v1/models")
    return process, f"http://127.0.0.1:{port}/v1/chat/completions"


def serve_pass_through(port: int, upstream: str) -> None:
    """Starlette in front, aiohttp behind."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    clients: list[aiohttp.ClientSession] = []

    async def forward(request: Request) -> Response:
        if not clients:
            clients.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        async with clients[0].post(f"{upstream}{request.url.path}", data=await request.body()) as answer:
            return Response(await answer.read(), answer.status, media_type="application/json")

    app = Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


async def start_litellm(
    stack: ExitStack, upstream: str, venv: Path, folder: Path
) -> tuple[Measured, str, dict[str, str]]:
    """LiteLLM's proxy with one worker and no database."""
    port, key = free_port(), f"sk-{secrets.token_hex(8)}"
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: m\n"
        "    litellm_params:\n"
        f"      {{model: hosted_vllm/m, api_base: {upstream}/v1, api_key: k}}\n"
        f"general_settings: {{master_key: {key}}}\n"
    )
    command = [venv / "bin" / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}
    process = start_command(stack, command, env=env, log=folder / "litellm.log")
    await wait_until_up(f"http://127.0.0.1:{port}/health/liveliness")
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return process, url, {"Authorization": f"Bearer {key}"}


async def start_agent_lightning(
    stack: ExitStack, upstream: str, venv: Path, folder: Path
) -> tuple[Measured, str, dict[str, str]]:
    """agent-lightning's server, recording one rollout in train mode."""
    port, key = free_port(), secrets.token_hex(8)
    url, headers = f"http://127.0.0.1:{port}", {"Authorization": f"Bearer {key}"}
    settings = [f"port={port}", "host=127.0.0.1", f"key={key}", "default_proxy.model_name=m"]
    command = [venv / "bin" / "agl-server", *settings, f"hydra.run.dir={folder / 'agent-lightning'}"]
    process = start_command(stack, command, log=folder / "agent-lightning.log")
    await wait_until_up(f"{url}/healthz")
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as http:
        await http.post(f"{url}/api/models", json=[{"model": "m", "endpoint": f"{upstream}/v1"}])
        await http.post(f"{url}/api/rollouts", json=[{"rollout_id": "r", "input": {}}])
    path = "proxy/rollout/r/attempt/0/mode/train/openai/v1/chat/completions"
    return process, f"{url}/{path}", headers
