"""What crosses a process boundary: the gateway's control API over HTTP, and the two files a model
runtime and its trainer process speak through.

The control API asks for `Authorization: Bearer $REPERTORY_ADMIN_KEY`; a session's own key opens only that
session.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_serializer,
    model_validator,
)

from model_runtime.documents import DesiredState
from model_runtime.errors import ConfigError
from model_runtime.store import check_key

ADMIN_KEY_ENV = "REPERTORY_ADMIN_KEY"
STORE_UNAVAILABLE = "store_unavailable"
"""Code of the gateway's answer while its store is away."""

RuntimeStatus = Literal["starting", "ready", "syncing", "failed", "stopped"]
TrainerState = Literal["loading", "running", "waiting", "drained", "finished", "no_signal", "failed"]


def admin_key() -> str:
    """The control API's key from the environment. Raises ConfigError when it is not set."""
    key = os.environ.get(ADMIN_KEY_ENV, "")
    if len(key) < 16:
        raise ConfigError(f"{ADMIN_KEY_ENV} must be set to a secret of at least 16 characters")
    return key


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Incoming(_Wire):
    """What the gateway takes in. No text of it holds what no log, no answer and no journal can."""

    @model_validator(mode="after")
    def _texts_can_be_written(self) -> Self:
        for name, value in self:
            if not _is_encodable(value):
                raise ValueError(f"{name} holds half of a surrogate pair, which is no text")
        return self


# ------------------------------------------------------------------ runtime → gateway: lease and binding


def _encodable(text: Any) -> Any:
    """JSON can carry half a surrogate pair, which no log can."""
    try:
        if isinstance(text, str):
            text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no text") from None
    return text


def _is_encodable(value: Any) -> bool:
    """Models look after themselves."""
    match value:
        case str():
            return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
        case dict():
            return all(map(_is_encodable, value)) and all(map(_is_encodable, value.values()))
        case list():
            return all(map(_is_encodable, value))
    return True


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("must read http(s)://host[:port]")
    return url


def _header_value(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("must be printable ASCII, as it travels in a header")
    return key


def _store_key(key: str) -> str:
    check_key(key)
    return key


StoreKey = Annotated[str, AfterValidator(_store_key)]
Text = Annotated[str, BeforeValidator(_encodable)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Replica(_Incoming):
    """One rollout server that is ready: loaded with every live version, canary passed."""

    replica_id: str
    url: Annotated[str, AfterValidator(_http_url)] = Field(json_schema_extra={"pattern": r"^https?://[\w\[]"})
    api_key: Annotated[SecretStr, AfterValidator(_header_value)] = Field(
        json_schema_extra={"writeOnly": False, "pattern": "^[ -~]*$"}
    )  # masked where it is shown

    @field_serializer("api_key", when_used="json")
    def _reveal(self, key: SecretStr) -> str:
        return key.get_secret_value()  # the wire is the only place it is written to


class QueueReport(_Incoming):
    """What the model's trainer knows of its log; the model's side of admission (design: used, limit)."""

    untrained_groups: Count = 0  # usable groups read and not yet trained
    trained_since_publish: Count = 0
    feed_share: float = 1.0  # moving fraction of settled groups that were usable for this model
    read_positions: dict[str, Count] = Field(default_factory=dict)  # writer → next seq to read
    oldest_queued_version: Count | None = None
    closed_groups: Count = 0  # settled without signal since one was last usable


class ServerLoad(_Incoming):
    """What a model's rollout servers last said of themselves."""

    num_running: Count = 0  # generations, all servers together
    num_waiting: Count = 0  # generations queued in the servers
    kv_cache_use: float | None = None  # of the fullest server, 0 to 1; None: not known
    num_preemptions: Count = 0  # since the servers started


class ModelRenewal(_Incoming):
    """PUT /admin/models/{model_id}. Order: (epoch, incarnation, seq); an older one is answered `stop`."""

    model_id: str
    epoch: Count
    incarnation: Count
    seq: Count
    kind: Literal["trainable", "frozen"]
    status: RuntimeStatus
    reason: str = ""
    replicas: list[Replica] = Field(default_factory=list)
    published_version: Count | None = None
    live_versions: list[Count] = Field(default_factory=list)
    base_served: bool = False  # a frozen model without an adapter: the base itself is version 0
    tokenizer_uri: Annotated[str, AfterValidator(_store_key)] | None = (
        None  # key in the store of its TokenizerDocument
    )
    trainer_state: TrainerState | None = None
    committed_version: Count | None = None
    step: Count = 0
    limit: Count = 0
    steps_left: Count | None = None  # None: no bound
    queue: QueueReport = QueueReport()
    load: ServerLoad = ServerLoad()
    totals: dict[str, int] = Field(default_factory=dict)  # books of the trainer: trained, dropped.<reason>, …
    last_metrics: dict[str, float] = Field(default_factory=dict)


class RenewalAnswer(_Wire):
    desired: DesiredState
    epoch: int
    superseded: bool = False  # a newer renewal or epoch was seen: stop at once
    oldest_open_version: int | None = None  # oldest token of this model in a session still open
    inflight_versions: dict[int, int] = Field(default_factory=dict)  # version → requests in flight


# ------------------------------------------------------------------ driver → gateway: groups and sessions


def _plain_component(name: str) -> str:
    if ":" in name:
        raise ValueError("must hold no colon: `agent:<name>` and `workflow:<name>` are said in the config")
    return name


Index = Annotated[int, Field(ge=0, lt=2**31)]  # as the log keeps it
GroupSize = Annotated[int, Field(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
RewardValue = Annotated[float, Field(allow_inf_nan=False, ge=-1e9, le=1e9)]
"""Bounded, so that no sum or square of rewards overflows."""


class _Request(_Incoming):
    """What people write by hand: an unknown field is a misspelt one, and is refused."""

    model_config = ConfigDict(extra="forbid")


class GroupRequest(_Request):
    """POST /groups. Idempotent by group_id: asking again keeps the place in the line."""

    group_id: Text = Field(min_length=1, max_length=200)
    group_size: GroupSize
    wait_s: float = Field(default=25.0, ge=0, le=60)  # the call's wait before it answers `waiting`; 0: 429
    deadline_s: Seconds | None = None  # from opening; then open members are cancelled
    settled_members: list[Index] = Field(default_factory=list)  # settled in an earlier life of the gateway


class GroupAnswer(_Wire):
    group_id: str
    status: Literal["open", "waiting", "ended"]
    train: dict[str, bool] = Field(default_factory=dict)  # model_id → its rows of this group may be trained


class SessionRequest(_Request):
    """POST /sessions. Training sessions name an open group; evaluation sessions stand outside groups.

    A member that is settled, or finished and awaits its rewards alone, is refused with 409 `already_done`:
    nothing is left to do for it. Other conflicts (`conflict`) may pass."""

    mode: Literal["train", "eval"] = "train"
    group_id: Text = Field(min_length=1, max_length=200)
    group_size: GroupSize = 1
    member_index: Index = 0
    attempt: Index = 0
    # For the only driver there is: what one that is gone left open of the member ends as `retried`, and this
    # is the next attempt.
    takes_over: bool = False
    sampling: dict[str, float | int] = Field(default_factory=dict)  # defaults for requests that name none
    forced_sampling: dict[str, float | int] = Field(default_factory=dict)  # overrides what requests name
    timeout_s: Seconds | None = None
    versions: dict[str, Count] = Field(
        default_factory=dict
    )  # that answer an evaluation, of those held for it


class HoldRequest(_Request):
    """PUT /admin/evaluations/{evaluation_id}: keep one version of each model in service for a while. Asked
    again before `ttl_s` is over, it goes on."""

    ttl_s: float = Field(default=60.0, gt=0, le=600)
    versions: dict[str, Count] = Field(default_factory=dict)  # of a model not named: the published one
    run_id: str | None = None  # a gateway of another run refuses; None: whichever it serves


class HoldAnswer(_Wire):
    evaluation_id: str
    versions: dict[str, int]  # model_id → the version that is held


class SessionAnswer(_Wire):
    session_id: str
    base_url: str  # <gateway>/sessions/<id>; an agent's OpenAI base_url is {base_url}/agents/{agent_id}/v1
    api_key: str
    workflow_id: str


class RewardRequest(_Request):
    """POST /sessions/{id}/reward. Without agent_id: of the workflow. With request_id (a completion's `id`
    will do): of a turn. `null` withdraws. Replaceable until finalize. NaN, infinities and values beyond
    ±1e9 are refused (422)."""

    reward: RewardValue | None
    component: Annotated[Text, AfterValidator(_plain_component)] = Field(
        default="reward", min_length=1, max_length=200
    )
    agent_id: str | None = None
    request_id: str | None = None


class AwaitedReward(_Request):
    """A reward that a judge will give later; named as in RewardRequest."""

    component: Text = Field(default="reward", min_length=1, max_length=200)
    agent_id: str | None = None
    request_id: str | None = None


class FinalizeRequest(_Request):
    """POST /sessions/{id}/finalize. Answers when rows and settlements are durable.

    With `reward_deadline_s`, and while an awaited reward is missing (by default the workflow's `reward`), the
    answer is 202 `awaiting_reward`: the session takes rewards and no more calls, and settles when the last
    awaited one has come, the deadline passes, its group's time is up, or finalize is called again without a
    deadline."""

    reward: RewardValue | None = None
    reward_deadline_s: float | None = Field(default=None, gt=0, le=7 * 86400)
    awaits: list[AwaitedReward] = Field(default_factory=list, max_length=1000)


class AbortRequest(_Request):
    """POST /sessions/{id}/abort."""

    status: Literal["aborted", "expired", "infra", "retried"] = "aborted"
    reason: Text = Field(default="", max_length=10_000)


class TurnView(_Wire):
    """One model call of a conversation."""

    request_id: str
    version_min: int
    version_max: int
    num_tokens: int  # sampled
    finish_reason: str
    rewards: dict[str, float | None]
    started_at: float
    ended_at: float


class ChainView(_Wire):
    """One conversation of one agent."""

    agent_id: str
    model_id: str
    chain_index: int
    train: bool
    num_prompt_tokens: int
    num_tokens: int  # after the prompt
    num_sampled_tokens: int
    rewards: dict[str, float | None]
    turns: list[TurnView]


class SessionView(_Wire):
    """GET /sessions/{id}: what an open session holds, or an ended one left."""

    session_id: str
    workflow_id: str
    mode: Literal["train", "eval"]
    status: str = "open"  # or its settlement's
    reason: str = ""  # of that settlement
    running_calls: int
    rewards: dict[str, float | None]  # of the workflow
    chains: list[ChainView]


class FinalizeAnswer(_Wire):
    session_id: str
    status: str  # the settlement's (`infra` when an agent was answered with a 5xx), or `awaiting_reward`
    num_rows: dict[str, int]  # model_id → trajectories
    num_refused: int = 0  # trajectories that broke an invariant
    awaits: list[AwaitedReward] = Field(default_factory=list)  # rewards that have not come yet


class DesiredRequest(_Incoming):
    """PUT /admin/desired, by the parent."""

    state: DesiredState
    reason: str = ""


RunRole = Literal["parent", "rollout", "evaluation"]


class SignOfLife(_Wire):
    """POST /admin/alive, by the processes of a run that hold no lease."""

    role: RunRole
    failed_models: list[str] = []
    """By the parent: models that have failed for good. A gateway that never heard of one, which failed while
    it started or before the gateway was restarted, does not wait for it."""


class ModelStatus(_Wire):
    """One model in GET /admin/status."""

    model_id: str
    ready: bool
    age_s: float | None  # since its last renewal
    renewal: ModelRenewal | None  # with keys masked
    used: float
    waiting_requests: int
    waited_s: float = 0.0  # by all calls so far for a ready model; 0 when none ever waited
    running_requests: int
    finalized_rows: int  # trajectories written to this model's log in this epoch
    sampled_tokens: int
    tokens_per_s: float
    window: int | None = None  # groups in flight it may have; None: adaptive concurrency is off
    pressure: str | None = None  # hungry, steady, full or congested: what moves the window
    template_problem: str | None = None  # what its chat template rewrites: such turns start new chains


class GatewayStatus(_Wire):
    """GET /admin/status."""

    run_id: str
    epoch: int
    desired: DesiredState
    models: dict[str, ModelStatus]
    open_groups: int
    waiting_groups: int
    open_sessions: int
    settlements: dict[str, int]  # status → executions
    agent_rewards: dict[str, dict[str, float]] = Field(default_factory=dict)
    heard_s: dict[str, float] = Field(default_factory=dict)  # role → since its last sign of life


# ------------------------------------------------------------------ runtime ↔ trainer: two small files

CONTROL_FILE = "trainer_control.json"
STATUS_FILE = "trainer_status.json"
STORE_OUTAGE_EXIT_CODE = 4


class TrainerControl(_Wire):
    """trainer_control.json, replaced atomically by the runtime, read by the trainer between steps."""

    desired: DesiredState = "run"
    published_version: int | None = None
    oldest_open_version: int | None = None


class TrainerStatus(_Wire):
    """trainer_status.json, replaced atomically by the trainer at every change, and at least each second
    (`heartbeat_at` moves; a trainer whose does not is hung)."""

    pid: int
    state: TrainerState
    reason: str = ""
    heartbeat_at: float
    step: int = 0
    committed_version: int | None = None
    committed_step: int | None = None
    checkpoint_step: int | None = None
    steps_left: int | None = None
    queue: QueueReport = QueueReport()
    totals: dict[str, int] = Field(default_factory=dict)
    last_metrics: dict[str, float] = Field(default_factory=dict)


class TrainerSpec(_Wire):
    """The trainer process's single argument: a JSON file with all it needs."""

    run_id: str
    model_id: str
    epoch: int
    incarnation: int
    config: dict  # RunConfig as JSON
    mailbox: str  # folder of the two files
    gpu_ids: list[int] = Field(default_factory=list)
