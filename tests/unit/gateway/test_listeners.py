"""`python -m gateway` on two listeners: one for agents, one for the control API."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from model_runtime.config import StoreConfig
from model_runtime.errors import BackendUnavailableError, ConfigError
from model_runtime.gateway_client import GatewayClient, open_http
from model_runtime.processes import free_port
from model_runtime.protocol import ADMIN_KEY_ENV, FinalizeAnswer, FinalizeRequest
from model_runtime.store import Store, open_store
from model_runtime.workspace import HOME_ENV
from tests.gateway_harness import ADMIN_KEY, RUN_ID, make_config

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
START_LIMIT_S = 60


@dataclass(frozen=True)
class GatewayAtWork:
    process: subprocess.Popen[bytes]
    agents_url: str
    admin_url: str


@contextmanager
def gateway_process(
    folder: Path, store: Store, *, admin_port: int | None = None, **settings: Any
) -> Iterator[GatewayAtWork]:
    config = folder / "config.json"
    config.write_text(json.dumps(make_config(**settings).model_dump(mode="json")))
    port = free_port()
    arguments = ["--run-id", RUN_ID, "--config", str(config), "--store-url", store.url]
    arguments += ["--epoch", "1", "--incarnation", "1", "--port", str(port)]
    arguments += [] if admin_port is None else ["--admin-port", str(admin_port)]
    scheme = "https" if settings.get("tls_certificate") else "http"
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        env=os.environ | {ADMIN_KEY_ENV: ADMIN_KEY, HOME_ENV: str(folder)},
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield GatewayAtWork(process, f"{scheme}://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        finally:
            process.kill()


def wait_until_up(gateway: GatewayAtWork) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        assert gateway.process.poll() is None, "the gateway exited"
        try:
            httpx.get(f"{gateway.admin_url}/health", timeout=1)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the gateway did not start")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayAtWork]:
    folder = tmp_path_factory.mktemp("gateway")
    store = open_store(StoreConfig(url=str(folder / "store")))
    with gateway_process(folder, store, admin_port=free_port()) as gateway:
        wait_until_up(gateway)
        yield gateway


def open_session(gateway: GatewayAtWork) -> dict[str, Any]:
    body = {"mode": "eval", "group_id": "e"}
    return httpx.post(f"{gateway.admin_url}/sessions", json=body, headers=ADMIN).raise_for_status().json()


CONTROL = [
    ("GET", "/admin/status"),
    ("GET", "/metrics"),
    ("PUT", "/admin/desired"),
    ("PUT", "/admin/models/plan"),
    ("POST", "/admin/alive"),
    ("POST", "/groups"),
    ("POST", "/sessions"),
]


@pytest.mark.parametrize(("method", "path"), CONTROL)
def test_the_agents_listener_has_no_control_api_whatever_the_key(
    gateway: GatewayAtWork, method: str, path: str
) -> None:
    for headers in ({}, ADMIN):
        assert httpx.request(method, gateway.agents_url + path, json={}, headers=headers).status_code == 404


@pytest.mark.parametrize(("method", "path"), [c for c in CONTROL if c[1] != "/metrics"])
def test_the_control_api_asks_for_its_own_key(gateway: GatewayAtWork, method: str, path: str) -> None:
    session = open_session(gateway)
    for headers in ({}, {"Authorization": f"Bearer {session['api_key']}"}):
        answer = httpx.request(method, gateway.admin_url + path, json={}, headers=headers)
        # A body is read before the key is asked for; without a key nothing else comes of it.
        assert answer.status_code in (401, 422)
        assert answer.json()["error"]["code"] in ("invalid_api_key", "invalid_request")
    assert httpx.get(f"{gateway.admin_url}/admin/status", headers=ADMIN).json()["run_id"] == RUN_ID


def test_a_session_lives_at_the_agents_listener_where_the_admin_key_opens_nothing(
    gateway: GatewayAtWork,
) -> None:
    session = open_session(gateway)
    assert session["base_url"] == f"{gateway.agents_url}/sessions/{session['session_id']}"
    own = {"Authorization": f"Bearer {session['api_key']}"}
    url = f"{session['base_url']}/reward"
    assert httpx.post(url, json={"reward": 1.0}, headers=ADMIN).status_code == 401
    assert httpx.post(url, json={"reward": 1.0}, headers=own).status_code == 200
    assert httpx.get(f"{session['base_url']}/v1/models", headers=own).status_code == 200
    # The driver, who has the admin key, ends it at the control API.
    ended = httpx.post(f"{gateway.admin_url}/sessions/{session['session_id']}/finalize", headers=ADMIN)
    assert ended.json()["status"] == "finalized"


def test_a_sessions_key_opens_no_other_session(gateway: GatewayAtWork) -> None:
    mine, theirs = open_session(gateway), open_session(gateway)
    key = {"Authorization": f"Bearer {mine['api_key']}"}
    for path, body in (
        ("reward", {"reward": 1.0}),
        ("finalize", {}),
        ("abort", {}),
        ("agents/planner/v1/chat/completions", {"messages": []}),
        ("agents/planner/v1/messages", {"messages": []}),
        ("agents/planner/v1/responses", {"input": "hello"}),
    ):
        answer = httpx.post(f"{theirs['base_url']}/{path}", json=body, headers=key)
        assert answer.status_code == 401, path
    assert httpx.get(f"{theirs['base_url']}/v1/models", headers=key).status_code == 401


def test_both_listeners_end_cleanly_at_sigterm(tmp_path: Path, local_store: Store) -> None:
    with gateway_process(tmp_path, local_store, admin_port=free_port()) as gateway:
        wait_until_up(gateway)
        session = open_session(gateway)
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(10) == 0
        for url in (session["base_url"], gateway.admin_url):
            with pytest.raises(httpx.ConnectError):
                httpx.get(url)


def failure_of(gateway: GatewayAtWork) -> str:
    assert gateway.process.wait(START_LIMIT_S) == 1
    assert gateway.process.stderr is not None
    return gateway.process.stderr.read().decode().splitlines()[-1]


def test_a_network_never_gets_both_apis_on_one_listener(tmp_path: Path, local_store: Store) -> None:
    with gateway_process(tmp_path, local_store, host="0.0.0.0") as gateway:
        assert "give it a listener of its own with gateway.admin_port" in failure_of(gateway)


def test_a_taken_port_is_named(tmp_path: Path, local_store: Store, gateway: GatewayAtWork) -> None:
    taken = int(gateway.admin_url.rsplit(":", 1)[1])
    with gateway_process(tmp_path, local_store, admin_port=taken) as second:
        assert f"gateway.admin_port: 127.0.0.1:{taken} can't be listened on" in failure_of(second)


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """PEM files of a self-signed certificate for 127.0.0.1, and of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(folder / "certificate.pem"), str(folder / "key.pem")


@pytest.fixture(scope="module")
def tls_gateway(
    tmp_path_factory: pytest.TempPathFactory, certificate: tuple[str, str]
) -> Iterator[GatewayAtWork]:
    folder = tmp_path_factory.mktemp("gateway")
    store = open_store(StoreConfig(url=str(folder / "store")))
    settings = {"tls_certificate": certificate[0], "tls_key": certificate[1]}
    with gateway_process(folder, store, admin_port=free_port(), **settings) as gateway:
        wait_until_up(gateway)
        yield gateway


def test_with_a_certificate_agents_speak_tls(
    tls_gateway: GatewayAtWork, certificate: tuple[str, str]
) -> None:
    session = open_session(tls_gateway)
    assert session["base_url"].startswith("https://127.0.0.1:")
    url, headers = f"{session['base_url']}/v1/models", {"Authorization": f"Bearer {session['api_key']}"}
    trusting = ssl.create_default_context(cafile=certificate[0])
    assert httpx.get(url, headers=headers, verify=trusting).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url, headers=headers)
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"), headers=headers)


async def test_the_driver_trusts_the_configured_certificate_and_no_other(
    tls_gateway: GatewayAtWork, certificate: tuple[str, str]
) -> None:
    session, reward = open_session(tls_gateway), {"reward": 1.0}
    url, path = f"{session['base_url']}/reward", f"/sessions/{session['session_id']}/finalize"
    async with open_http(max_connections=2) as http:
        driver = GatewayClient(tls_gateway.admin_url, http, admin_key=ADMIN_KEY, patience_s=1)
        with pytest.raises(BackendUnavailableError, match="certificate"):
            await driver.call(url, reward, api_key=session["api_key"], timeout_s=2)
    async with open_http(max_connections=2, trusted_certificate=certificate[0]) as http:
        driver = GatewayClient(tls_gateway.admin_url, http, admin_key=ADMIN_KEY, patience_s=5)
        assert await driver.call(url, reward, api_key=session["api_key"], timeout_s=10) == {"ok": True}
        ended = await driver.control(path, FinalizeRequest(), FinalizeAnswer, timeout_s=10)
        assert ended.status == "finalized"


def test_files_that_are_no_certificate_and_key_are_named(
    tmp_path: Path, local_store: Store, certificate: tuple[str, str]
) -> None:
    with gateway_process(
        tmp_path, local_store, tls_certificate=certificate[0], tls_key=certificate[0], admin_port=free_port()
    ) as gateway:
        message = failure_of(gateway)
    assert f"gateway.tls_key '{certificate[0]}'" in message


def test_a_certificate_the_driver_cannot_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tls_certificate '.*none\.pem'"):
        open_http(max_connections=1, trusted_certificate=str(tmp_path / "none.pem"))
