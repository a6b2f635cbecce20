"""The section `gateway` of the configuration."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from model_runtime.config_section import Section


class AdaptiveConcurrencyConfig(Section):
    """How many groups of each model are in flight at once, moved by its queue and its servers."""

    enable: bool = False
    """False: groups open whenever budgets and the driver have room."""
    min_groups: int | None = Field(default=None, ge=1)
    """Groups in flight a model always may have. None: what one training step takes."""
    max_groups: int | None = Field(default=None, ge=1)
    """Groups in flight a model may have at most. None: workflow.max_concurrent_executions / group_size."""
    increase: int = Field(default=1, ge=1)
    """Groups added when the trainer waits for data and no server is congested."""
    decrease: float = Field(default=0.7, gt=0, lt=1)
    """Factor when work piles up untrained, or a server is congested."""
    interval_s: float = Field(default=5.0, gt=0)
    """Least time between two moves: what a move did has to be seen before the next."""
    queue_high_batches: float = Field(default=2.0, ge=1)
    """Batches of untrained groups beyond which a model counts as full."""
    waiting_high: float = Field(default=1.0, ge=0)
    """Calls waiting for each one running, beyond which a model's servers count as congested."""
    kv_cache_high: float = Field(default=0.9, gt=0, le=1)
    """Share of a server's KV cache in use from which on it counts as congested."""

    @model_validator(mode="after")
    def _ordered(self) -> AdaptiveConcurrencyConfig:
        if self.min_groups and self.max_groups and self.min_groups > self.max_groups:
            raise ValueError(f"min_groups is {self.min_groups}, more than max_groups, {self.max_groups}")
        return self


class GatewayConfig(Section):
    """The one thing on the request path."""

    mode: Literal["multi_model_router"] = "multi_model_router"
    """The RFC's mode; the only one."""
    host: str = "127.0.0.1"
    """Address agents reach the gateway at; auto: the machine's own, as in a pod. Anything but loopback
    exposes the models to that network (session keys are asked)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port for agents. None: a free one, kept for the whole life of the run."""
    admin_host: str = "127.0.0.1"
    """Address of the control API, or auto: groups, opening sessions, models, status, metrics. It has a
    listener and a key of its own. Anything but loopback sends that key over that network."""
    admin_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the control API. None: a free one, kept for the whole life of the run."""
    public_url: str | None = None
    """Where agents find the gateway when that is not host and port: behind a proxy, or by the name in its
    certificate. Base URLs of sessions begin with it."""
    tls_certificate: str | None = None
    """PEM file with the certificate, and its chain, that agents are shown. None: plain HTTP."""
    tls_key: str | None = None
    """PEM file with the certificate's private key."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for one model call, the wait for its model included."""
    attempt_timeout_s: float | None = Field(default=None, gt=0)
    """Limit for one attempt at one rollout server, after which another is tried: for the whole answer, or for
    the next token of one that is streamed. None: half of the time the call has left while its model has
    another server, else all of it."""
    roll_back_rewritten_turns: bool = True
    """What becomes of a sampled turn that the agent sends back in other words. True: it is taken back, and
    the chain goes on from the turn before it. False: it stays, and the conversation starts a new chain."""
    allow_off_policy_sampling: bool = False
    """Whether agents of training sessions may use settings that draw from another distribution than the
    model's own: top_p, top_k, min_p, penalties, tool_choice required. They are recorded with the turn."""
    commit_interval_s: float = Field(default=0.5, ge=0)
    """Longest wait before finalized work is written."""
    commit_max_rows: int = Field(default=256, ge=1)
    """Rows that trigger a write at once."""
    commit_max_bytes: int = Field(default=8 * 2**20, ge=1)
    """Bytes that trigger a write at once."""
    session_idle_s: float | None = Field(default=None, gt=0)
    """A session that nobody asks anything of for this long after its last answer settles as expired. None:
    only its own limit ends it."""
    lease_s: float = Field(default=10.0, gt=0)
    """A model not renewed for this long is not ready."""
    renew_interval_s: float = Field(default=2.0, gt=0)
    """Longest time between two renewals of a model's lease."""
    max_surplus_ratio: float = Field(default=1.0, ge=0)
    """How far groups may open with train=false for models that are full. 0: wait for them."""
    adaptive_concurrency: AdaptiveConcurrencyConfig = AdaptiveConcurrencyConfig()
    """Windows of groups in flight for each model, so that one that lacks data gets more of the workflows that
    feed it, beyond max_surplus_ratio, and one that has enough piles up none. Off by default."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of the gateway process before the run fails."""
    max_request_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Longest body of a request; a longer one is answered 413."""
    max_header_bytes: int = Field(default=64 * 2**10, ge=1024)
    """Longest request line and headers; longer ones are answered 431."""
    max_sessions: int = Field(default=10_000, ge=1)
    """Sessions open at once; opening another is answered 429 until one ends."""
    max_chains_per_session: int = Field(default=1_000, ge=1)
    """Conversations of one session, over all its agents; a call that begins another is answered 429."""
    max_concurrent_requests: int = Field(default=4_096, ge=1)
    """Model calls under way at once; another is answered 429. Control calls are not counted."""
    max_concurrent_requests_per_session: int = Field(default=256, ge=1)
    """Model calls of one session under way at once; another is answered 429."""
    log_format: Literal["text", "json"] = "text"
    """How the gateway's log is written: lines for people, or one JSON object a line."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least level that is logged. debug has a line for each model call; no level has prompts or keys."""

    def agents_url(self, port: int) -> str:
        """Where agents find a gateway that listens on `port` for them."""
        scheme = "http" if self.tls_certificate is None else "https"
        return self.public_url or f"{scheme}://{_reachable(self.host)}:{port}"

    def admin_url(self, port: int) -> str:
        """Where the parent, runtimes, drivers and the command line find the control API."""
        return f"http://{_reachable(self.admin_host)}:{port}"

    @field_validator("public_url")
    @classmethod
    def _a_base_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("must read http(s)://host[:port][/path]")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> GatewayConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: set both or neither")
        if self.port is not None and self.port == self.admin_port:
            raise ValueError(f"port and admin_port are both {self.port}: each is a listener of its own")
        return self


def _reachable(host: str) -> str:
    """An address, as URLs write it, to reach from this machine what listens on `host`."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
