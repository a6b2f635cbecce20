"""The JSON documents of a run in the store (their keys: layout.py). Read with `Document.parse`, which
names the object when its bytes are not what they should be."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_runtime.errors import CorruptObjectError

DesiredState = Literal["run", "drain", "stop"]


class Document(BaseModel):
    # Unknown fields are kept: a newer writer's document survives an older reader.
    model_config = ConfigDict(frozen=True, extra="allow")

    def to_bytes(self) -> bytes:
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def parse(cls, data: bytes, *, source: str) -> Self:
        """Raises CorruptObjectError naming `source`."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise CorruptObjectError(f"{source}: not a valid {cls.__name__}: {error}") from None


class RunDocument(Document):
    """run.json: what anybody needs to find the run's parts."""

    run_id: str
    config: dict[str, Any]
    epoch: int
    gateway_url: str | None = None  # of its control API
    latest_snapshot: int | None = None
    state: Literal["running", "completed", "cancelled", "failed"] = "running"
    created_at: float
    updated_at: float


class EpochClaim(Document):
    """control/epoch-<n>.json: one life of the parent."""

    epoch: int
    claimed_at: float
    flow_run_id: str | None = None
    host: str = ""


class DesiredDocument(Document):
    """control/desired-<n>.json: what the parent wants; the highest n counts. `stop` is sticky."""

    seq: int
    epoch: int
    state: DesiredState
    reason: str = ""
    written_at: float


class BatchRow(Document):
    """One trajectory of a batch."""

    trajectory_id: str
    writer: str
    seq: int
    agent_id: str
    policy_version: int


class ClosedGroup(Document):
    """A group that closed without being trained, and why:
    no_rows | too_few_values | zero_variance | cancelled | aged_out | not_for_training."""

    group_id: str
    reason: str
    num_trajectories: int = 0


class ReplayedGroup(Document):
    """A group of an earlier batch, trained once more."""

    group_id: str
    rows: list[BatchRow]


class RememberedRow(Document):
    """Where one row of a group in the replay buffer stands in the log."""

    trajectory_id: str
    writer: str
    seq: int


class RememberedGroup(Document):
    """A group in the replay buffer, every row of it."""

    group_id: str
    group_size: int
    num_reuses: int
    rows: list[RememberedRow]


class BatchDocument(Document):
    """batches/<step>.json: written before the update, read again when the step is replayed."""

    step: int
    epoch: int
    groups: list[str]
    rows: list[BatchRow]
    closed_untrained: list[ClosedGroup]
    dropped: dict[str, int] = Field(default_factory=dict)  # reason → trajectories that left the log untrained
    dropped_rows: dict[str, list[str]] = Field(default_factory=dict)  # the same, reason → trajectory ids
    replayed: list[ReplayedGroup] = Field(default_factory=list)  # trained before; not in groups and rows
    read_positions: dict[str, int]  # writer → next seq, as of this batch
    published_version: int = 0  # what lag was measured against: a replay masks the same tokens
    training_version: int = 0  # version the step started from
    created_at: float


class CanaryProbe(Document):
    """Logprobs of `token_ids` as the next token after `prompt_ids`, by the trainer in float32."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    previous_logprobs: list[float] | None = None  # of the version before, same prompt and tokens


class VersionDocument(Document):
    """versions/v<k>/VERSION.json: written last; without it the version does not exist."""

    version: int
    step: int
    epoch: int
    sha256: str  # of adapter_model.safetensors
    num_bytes: int
    num_tensors: int
    config_sha256: str  # of adapter_config.json
    canary: list[CanaryProbe]
    created_at: float


class CheckpointDocument(Document):
    """checkpoints/step-<n>/MANIFEST.json: written last; names everything a trainer resumes from."""

    step: int
    epoch: int
    version: int  # newest committed version at this step
    files: dict[str, str]  # name → sha256
    low_water: dict[str, int]  # writer → seq below which every record is consumed
    consumed: list[str]  # writer/seq/trajectory_id of rows at or above low water, trained or dropped
    closed_groups: list[str]  # groups at or above low water that are closed
    totals: dict[str, int]  # books: TrainingQueue.totals
    replay: list[RememberedGroup] = Field(default_factory=list)  # the replay buffer, oldest first
    seed: int
    created_at: float


class SnapshotDocument(Document):
    """snapshots/<n>.json: one version and checkpoint per model, named together."""

    number: int
    epoch: int
    versions: dict[str, int]
    checkpoints: dict[str, int]
    created_at: float


class TokenizerDocument(Document):
    """tokenizer/<sha256>.json: what the gateway renders and decodes with."""

    tokenizer_json: str  # contents of tokenizer.json
    chat_template: str
    special_tokens: dict[str, str]  # bos_token, eos_token, pad_token, … as the template may use them
    eos_token_ids: list[int]  # tokens that end a turn
    vocab_size: int
    max_model_len: int
