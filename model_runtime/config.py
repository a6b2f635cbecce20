"""The whole configuration of a run: one frozen tree, and the typed parameter of the training flow.

Validation reads no file, device or environment variable: a config is valid or not wherever it is looked
at. What a machine lacks is said by `repertory doctor` and at the start of a run.

Files may be nested as in the RFC (`multi_model.models`, `agent_model_mapping` as a map).
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from model_runtime.alerts_config import AlertsConfig
from model_runtime.config_section import Section
from model_runtime.errors import ConfigError
from model_runtime.evaluation_config import EvaluationConfig
from model_runtime.gateway_config import GatewayConfig
from model_runtime.objective_config import ObjectiveConfig
from model_runtime.sync_config import SyncConfig
from model_runtime.tracing import TracingConfig
from model_runtime.trainer_config import LoRAConfig, LoRARank, TrainerConfig
from model_runtime.training_config import ReplayConfig, RetentionConfig, SupervisedConfig, TrackingConfig

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
"""Run, model and agent ids."""


class StoreConfig(Section):
    """Where everything durable lives."""

    url: str = "./runs"
    """A local folder, `file://…` or `s3://bucket/prefix`. S3 credentials and endpoint come from the
    environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)."""
    credentials_block: str | None = None
    """Prefect block of type Secret with those variables, as a JSON object; flows read it when they begin.
    None: the environment has them."""
    single_writer: bool = False
    """Accept a store that ignores conditional writes. Two runs on one folder can then harm each other."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Limit for one attempt to connect."""
    read_timeout_s: float = Field(default=30.0, gt=0)
    """Limit for one attempt to get an answer."""
    operation_timeout_s: float = Field(default=120.0, gt=0)
    """Limit for one operation, its retries included."""
    max_attempts: int = Field(default=4, ge=1, le=20)
    """Attempts per operation."""
    max_outage_s: float = Field(default=600.0, ge=0)
    """A run goes on while the store is away, or full, for this long: it serves, collects and trains from
    what it holds. Then it stops, to be resumed."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        if "${" in url:
            raise ValueError("variables are not filled in: write the URL itself")
        if re.match(r"(s3|file):(?!//)", url):
            raise ValueError("two slashes follow the colon: s3://bucket/prefix or file:///folder")
        scheme = url.split("://", 1)[0] if "://" in url else "file"
        if scheme not in ("file", "s3"):
            raise ValueError("must be a local path, file://… or s3://bucket/prefix")
        if scheme == "s3" and not url.removeprefix("s3://").split("/", 1)[0]:
            raise ValueError("names no bucket; write s3://bucket/prefix")
        return url


class RolloutConfig(Section):
    """The vLLM servers of one model."""

    n_gpus: int = Field(default=0, ge=0)
    """GPUs for serving: replicas × tensor_parallel_size. 0: the CPU."""
    replicas: int | None = Field(default=None, ge=1)
    """Servers. None: n_gpus / tensor_parallel_size, or 1 on the CPU."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs per server."""
    gpu_ids: list[int] | None = None
    """Devices to use. None: assigned in order, trainers and replicas apart."""
    gpu_memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of each device's memory. None: vLLM's own default, the device to itself."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. float32 makes sampled logprobs exact to 1e-4."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt + response in tokens. None: the model's own."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together by one server."""
    max_concurrent_requests: int | None = Field(default=None, ge=1)
    """Generations the gateway gives one server at once; further calls wait in the gateway, first come, first
    served, and begin under the version that is published by then. None: they wait in the server itself, of
    which max_num_seqs run."""
    kv_cache_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """KV cache of one CPU server. GPUs use gpu_memory_fraction."""
    max_live_versions: int = Field(default=3, ge=2)
    """Policy versions one server holds at once (vLLM's max_loras): the current one, the next, and
    those that requests in flight still use."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one server (OMP_NUM_THREADS). More than the free cores is ruinous."""
    tool_call_parser: str | None = None
    """vLLM's parser for this model family's tool calls ("hermes", "llama3_json", …). None: the model is
    offered no tools, and a request that brings some is refused."""
    reasoning_parser: str | None = None
    """vLLM's parser that keeps reasoning apart from the answer ("qwen3", "deepseek_r1", …). None: whatever
    the model says is its answer."""
    host: str = "127.0.0.1"
    """Address the servers listen on: loopback or one of the private network, because what loads and unloads
    adapters is open to whoever reaches it; or auto, the machine's own, as in a pod."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for one server to become ready."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts of one server before the model counts as failed."""

    @property
    def num_replicas(self) -> int:
        """`replicas`, else n_gpus / tensor_parallel_size, else 1."""
        return self.replicas or max(1, self.n_gpus // self.tensor_parallel_size)

    @field_validator("host")
    @classmethod
    def _not_public(cls, host: str) -> str:
        if host in ("localhost", "auto"):
            return host
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(
                "must be an address, not a name: 127.0.0.1 or one of the private network"
            ) from None
        if address.is_unspecified or not address.is_private:
            raise ValueError(
                "must be an address of loopback or of the private network: whoever reaches a rollout server "
                "can load and unload its adapters"
            )
        return host

    @model_validator(mode="after")
    def _gpus_match(self) -> RolloutConfig:
        if self.n_gpus and self.num_replicas * self.tensor_parallel_size != self.n_gpus:
            raise ValueError(
                f"n_gpus is {self.n_gpus}, but replicas × tensor_parallel_size is "
                f"{self.num_replicas} × {self.tensor_parallel_size}"
            )
        if not self.n_gpus and self.tensor_parallel_size > 1:
            raise ValueError("tensor_parallel_size > 1 needs n_gpus")
        return self


class AsyncTrainingConfig(Section):
    """How far generation and training may drift apart. Names and formulas are verl's."""

    trigger_parameter_sync_step: int = Field(default=4, ge=1)
    """Training steps between two published versions."""
    staleness_threshold: float = Field(default=0.1, ge=0)
    """Share of extra groups admitted beyond what one version window trains. 0: none."""
    require_batches: int = Field(default=1, ge=1)
    """Batches a training step takes."""
    partial_rollout: bool = False
    """What becomes of generations that run when a new version is published. False: they finish under the
    version they began with. True: they are interrupted and go on under the new one from their own tokens,
    with one budget; the agent sees one answer, the record says which version sampled each token."""
    max_staleness: int = Field(default=4, ge=0)
    """Versions a token may lag behind the last published one when it is trained."""
    max_staleness_action: Literal["wait", "drop"] = "wait"
    """wait: training pauses until work in flight is in; drop: aged-out tokens are left out and counted."""
    max_wait_s: float | None = Field(default=None, ge=0)
    """For a model that is rarely called: once the first group of a batch has waited this long, train a
    smaller one, filled up from `replay`. None: wait until the batch is full."""
    strict_on_policy: bool = False
    """Train only on tokens of the version being updated: sync every step, threshold 0, lag 0."""

    @model_validator(mode="after")
    def _strict(self) -> AsyncTrainingConfig:
        if self.strict_on_policy and (self.trigger_parameter_sync_step != 1 or self.staleness_threshold != 0):
            raise ValueError(
                "strict_on_policy needs trigger_parameter_sync_step: 1 and staleness_threshold: 0, got "
                f"{self.trigger_parameter_sync_step} and {self.staleness_threshold}"
            )
        return self


class ModelConfig(Section):
    """One policy and its runtime."""

    model_id: Slug
    """Name of the policy."""
    model_path: str
    """Folder of the base model in Hugging Face's format."""
    kind: Literal["trainable", "frozen"] = "trainable"
    """frozen: a fixed version, served, never trained."""
    adapter_path: str | None = None
    """Folder of a PEFT adapter to start from (trainable) or to serve (frozen). None: the base model."""
    lora: LoRAConfig = LoRAConfig()
    """The adapter."""
    trainer: TrainerConfig = TrainerConfig()
    """The trainer process."""
    rollout: RolloutConfig = RolloutConfig()
    """The rollout servers."""
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    """Staleness and sync."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """Advantage, loss and correction."""
    replay: ReplayConfig = ReplayConfig()
    """Training again on groups of earlier batches. Off by default."""
    sft: SupervisedConfig | None = None
    """Supervised warm-up before the first version. None: none."""
    batch_size: int = Field(default=8, ge=1)
    """Usable groups per batch: groups of which at least one agent of this model has a gradient."""
    max_steps: int | None = Field(default=None, ge=1)
    """Training steps after which the model is only served. None: until the tasks end."""
    save_every: int = Field(default=10, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    max_response_tokens: int = Field(default=512, ge=1)
    """Upper bound of one answer's tokens; a request's own max_tokens is clamped to it."""

    @property
    def admission_limit(self) -> int:
        """Groups that may be untrained or trained but unpublished at once:
        int(batch_size × require_batches × (1 + staleness_threshold) × trigger_parameter_sync_step),
        verl's max_required_samples."""
        a = self.async_training
        required = self.batch_size * a.require_batches
        return max(required, int(required * (1 + a.staleness_threshold) * a.trigger_parameter_sync_step))

    @model_validator(mode="after")
    def _replays_when_late(self) -> ModelConfig:
        if self.replay.max_groups and self.async_training.max_wait_s is None:
            raise ValueError("replay fills up late batches: set async_training.max_wait_s, the time to wait")
        if self.replay.max_groups and self.async_training.strict_on_policy:
            raise ValueError("replay trains on older versions' tokens, which strict_on_policy excludes")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.kind == "frozen" and self.sft is not None:
            raise ValueError("a frozen model is not trained: leave sft out")
        if self.kind == "frozen" and self.trainer.n_gpus:
            raise ValueError("a frozen model has no trainer: leave trainer.n_gpus at 0")
        if self.trainer.learning_rate_schedule != "constant" and self.max_steps is None:
            raise ValueError(
                f"trainer.learning_rate_schedule {self.trainer.learning_rate_schedule!r} needs max_steps: "
                "it falls towards the last one"
            )
        return self


class MultiModelConfig(Section):
    """The policies trained together."""

    enable: bool = True
    """Kept for the RFC's files. False is refused: there is no single-model mode to fall back to."""
    models: list[ModelConfig] = Field(min_length=1)
    """One entry per policy."""
    on_model_failure: Literal["go_on", "stop"] = "go_on"
    """What becomes of the run when a model has failed for good. go_on: the others train on from what the
    agents still finish. stop: the run ends at once, to be resumed; for agents that need every model."""
    idle_limit_s: float | None = Field(default=1800.0, gt=0)
    """After a model has failed for good: the run ends too, to be resumed, when no other has trained a step
    for this long, as where every execution needs that model. None: they wait for ever. A run without
    `workflow.function` waits for its agents in any case."""

    @field_validator("enable")
    @classmethod
    def _enabled(cls, enable: bool) -> bool:
        if not enable:
            raise ValueError("must be true: one model is a list of one")
        return enable


class AgentRoute(Section):
    """One agent and the model that answers for it."""

    agent_id: Slug
    """Name the workflow gives the agent."""
    model_id: Slug
    """Model that serves it."""


def _routes_of_map(mapping: Any) -> Any:
    if isinstance(mapping, dict):
        return [{"agent_id": agent, "model_id": model} for agent, model in mapping.items()]
    return mapping


AgentMapping = Annotated[list[AgentRoute], BeforeValidator(_routes_of_map), Field(min_length=1)]


class WorkflowConfig(Section):
    """The work the agents do, and on which tasks."""

    function: str | None = None
    """`module:async_function(task, session)`. None: an outside driver opens the groups."""
    python_path: str | None = None
    """Folder the module is imported from. None: the config file's."""
    tasks: str | None = None
    """JSONL file, one task (a JSON object) a line."""
    held_out_tasks: str | None = None
    """JSONL file of tasks never trained on; worked on at the end as `evaluation` says."""
    group_size: int = Field(default=8, ge=2)
    """Executions of each task that are compared with one another."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the tasks."""
    shuffle: bool = True
    """Order the tasks anew in each epoch, by the run's seed."""
    max_concurrent_executions: int = Field(default=64, ge=1)
    """Executions running at once."""
    execution_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for one execution; then it settles as expired."""
    group_timeout_s: float = Field(default=900.0, gt=0)
    """Limit from a group's opening; then members still open are cancelled."""
    max_task_failures: int | None = Field(default=3, ge=1)
    """A task of which this many groups in a row ended without one finished execution is skipped from then
    on, and listed. None: never."""
    max_attempts: int = Field(default=2, ge=1)
    """Attempts at a member whose execution failed for the infrastructure's sake."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of agents that name none."""

    @field_validator("function")
    @classmethod
    def _module_and_function(cls, function: str | None) -> str | None:
        if function is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", function):
            raise ValueError("must read `module:function`")
        return function

    @model_validator(mode="after")
    def _function_needs_tasks(self) -> WorkflowConfig:
        if self.function is not None and self.tasks is None:
            raise ValueError("a workflow function needs `tasks`, a JSONL file")
        return self


class RunConfig(Section):
    """A training run: models, agents, workflow, store."""

    name: Slug = "default"
    """Name of the Prefect deployments made from this config."""
    multi_model: MultiModelConfig
    """The policies."""
    agent_model_mapping: AgentMapping
    """Which model answers for which agent. Files may write a map `agent_id: model_id`."""
    workflow: WorkflowConfig = WorkflowConfig()
    """Tasks and the code that works on them."""
    gateway: GatewayConfig = GatewayConfig()
    """The gateway."""
    store: StoreConfig = StoreConfig()
    """The store."""
    sync: SyncConfig = SyncConfig()
    """How models take turns in publishing."""
    retention: RetentionConfig = RetentionConfig()
    """What stays in the store of checkpoints, versions and logs. Everything by default."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of the held-out tasks."""
    alerts: AlertsConfig = AlertsConfig()
    """What is reported to people."""
    tracking: TrackingConfig = TrackingConfig()
    """TensorBoard, W&B, MLflow, Trackio. None by default."""
    tracing: TracingConfig = TracingConfig()
    """OpenTelemetry traces. None by default."""
    seed: int = Field(default=0, ge=0)
    """Seeds adapters, task order and samplers."""
    max_duration_s: float | None = Field(default=None, gt=0)
    """The run drains after this long. None: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        routes = [(route.agent_id, route.model_id) for route in self.agent_model_mapping]
        if mistakes := mapping_mistakes([m.model_id for m in self.models], routes):
            raise ValueError("\n".join(mistakes))
        _refuse_shared_gpus(self.models)
        return self

    @property
    def models(self) -> list[ModelConfig]:
        return self.multi_model.models

    def model(self, model_id: str) -> ModelConfig:
        """The model's section. Raises ConfigError for an unknown id."""
        for model in self.models:
            if model.model_id == model_id:
                return model
        raise ConfigError(f"unknown model {model_id!r}; models are {[m.model_id for m in self.models]}")

    @property
    def trainable_models(self) -> list[ModelConfig]:
        return [m for m in self.models if m.kind == "trainable"]

    @property
    def agent_to_model(self) -> dict[str, str]:
        return {route.agent_id: route.model_id for route in self.agent_model_mapping}

    def warnings(self) -> list[str]:
        """What is accepted but not yet honoured, one sentence each."""
        found = [
            f"{m.model_id}.objective: {warning}"
            for m in self.trainable_models
            for warning in m.objective.warnings()
        ]
        if self.workflow.function is None:
            found.append("workflow.function is not set: an outside driver must open the groups")
        return found


def artifact_slug(model_id: str) -> str:
    """The id as Prefect artifact keys spell it: lowercase letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", model_id).strip("-")


def mapping_mistakes(model_ids: Sequence[str], routes: Sequence[tuple[str, str]]) -> list[str]:
    """What models and the (agent, model) routes to them say wrongly about one another, one line each."""
    found = [
        f"{path}: {field} {value!r} is given more than once"
        for path, field, values in (
            ("multi_model.models", "model_id", model_ids),
            ("agent_model_mapping", "agent_id", [agent for agent, _ in routes]),
        )
        for value, times in Counter(values).items()
        if times > 1
    ]
    known = list(dict.fromkeys(model_ids))
    by_slug: dict[str, list[str]] = {}
    for model_id in known:
        by_slug.setdefault(artifact_slug(model_id), []).append(model_id)
    found += [
        f"multi_model.models: {clash} share the artifact key {slug!r}"
        for slug, clash in by_slug.items()
        if len(clash) > 1
    ]
    unknown = [
        f"agent_model_mapping.{agent}: unknown model {model_id!r}; models are {known}"
        for agent, model_id in routes
        if model_id not in known
    ]
    idle = [model_id for model_id in known if model_id not in {to for _, to in routes}]
    if idle and not unknown:  # else a misspelt route is enough to leave its model idle
        found.append(f"multi_model.models: no agent uses {idle}; add one to agent_model_mapping")
    return [*found, *unknown]


def _refuse_shared_gpus(models: list[ModelConfig]) -> None:
    """Devices named by gpu_ids are disjoint, or every user of one says its fraction and they sum to ≤ 1."""
    users: dict[int, list[tuple[str, float | None]]] = {}
    for model in models:
        for part in ("trainer", "rollout"):
            section = getattr(model, part)
            if section.gpu_ids is not None and len(section.gpu_ids) != section.n_gpus:
                raise ValueError(
                    f"{model.model_id}.{part}: gpu_ids names {len(section.gpu_ids)} devices, "
                    f"n_gpus is {section.n_gpus}"
                )
            for gpu in section.gpu_ids or []:
                users.setdefault(gpu, []).append((f"{model.model_id}.{part}", section.gpu_memory_fraction))
    for gpu, sharing in users.items():
        names = [name for name, _ in sharing]
        fractions = [fraction for _, fraction in sharing]
        if len(sharing) == 1:
            continue
        if any(f is None for f in fractions):
            raise ValueError(
                f"GPU {gpu} is given to {names}; set gpu_memory_fraction on each, or other gpu_ids"
            )
        total = sum(f for f in fractions if f is not None)
        if total > 1:
            raise ValueError(f"GPU {gpu}: gpu_memory_fraction of {names} sums to {total:.2f}; at most 1")


LORA_RANKS: tuple[int, ...] = get_args(LoRARank)
