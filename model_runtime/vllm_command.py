"""How one vLLM server is started: its command line and its environment."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

from model_runtime.config import LoRARank, ModelConfig
from model_runtime.errors import RolloutServerError
from model_runtime.layout import served_name
from model_runtime.vllm_environment import VLLMEnvironment

# vLLM's environment doesn't get what it has no use for: other interpreters' settings, and our secrets.
_WITHHELD = (
    "PYTHON",
    "VIRTUAL_ENV",
    "REPERTORY_",
    "AWS_",
    "PREFECT_",
    "VLLM_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE",
)
_PASSED_ON = ("REPERTORY_VLLM_",)  # switches of the plugin

# Adapters kept in memory beyond the slots, so that none in flight has to be read from disk again.
_SPARE_CPU_LORAS = 5
# Only full blocks enter the prefix cache; vLLM's default on the CPU is 128.
_CPU_BLOCK_SIZE = 32


def serves_adapters(model: ModelConfig) -> bool:
    """False for a frozen model without an adapter: its base is all there is."""
    return model.kind == "trainable" or model.adapter_path is not None


def base_name(model: ModelConfig) -> str:
    """Name under which the model's servers serve the base."""
    return f"{model.model_id}@base" if serves_adapters(model) else served_name(model.model_id, 0)


def server_argv(model: ModelConfig, environment: VLLMEnvironment, *, port: int) -> list[str]:
    """The command that starts one server. Holds no secret: other users of the machine can read it."""
    rollout = model.rollout
    if environment.build == "cpu":
        # `vllm serve` asks for the version of a distribution "vllm", which the CPU build is not.
        argv = [str(environment.python), "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    else:
        argv = [str(environment.python), "-m", "vllm.entrypoints.cli.main", "serve"]
    argv += [model.model_path, "--served-model-name", base_name(model)]
    argv += ["--host", rollout.host, "--port", str(port), "--disable-uvicorn-access-log"]
    argv += ["--dtype", rollout.dtype, "--max-num-seqs", str(rollout.max_num_seqs)]
    # Token ids in, token ids out; logprobs of the distribution that was sampled from.
    argv += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"]
    if rollout.max_model_len is not None:
        argv += ["--max-model-len", str(rollout.max_model_len)]
    if rollout.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", rollout.tool_call_parser]
    if rollout.reasoning_parser is not None:
        argv += ["--reasoning-parser", rollout.reasoning_parser]
    if serves_adapters(model):
        argv += ["--enable-lora", "--max-lora-rank", str(max_lora_rank(model))]
        argv += ["--max-loras", str(rollout.max_live_versions)]
        argv += ["--max-cpu-loras", str(rollout.max_live_versions + _SPARE_CPU_LORAS)]
    return argv + (_cpu_flags(model) if environment.build == "cpu" else _cuda_flags(model))


def _cpu_flags(model: ModelConfig) -> list[str]:
    return [
        "--enforce-eager",
        *("--distributed-executor-backend", "uni"),
        *("--block-size", str(_CPU_BLOCK_SIZE)),
        *("--kv-cache-memory-bytes", str(model.rollout.kv_cache_bytes)),
    ]


def _cuda_flags(model: ModelConfig) -> list[str]:
    flags = ["--tensor-parallel-size", str(model.rollout.tensor_parallel_size)]
    if model.rollout.gpu_memory_fraction is not None:
        flags += ["--gpu-memory-utilization", str(model.rollout.gpu_memory_fraction)]
    return flags


def server_env(model: ModelConfig, *, api_key: str, gpu_ids: list[int]) -> dict[str, str]:
    """The whole environment of one server."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) or not name.startswith(_WITHHELD)
    }
    env |= {
        "VLLM_API_KEY": api_key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        # Longer than any client keeps an idle connection, so that the client is the one that closes it.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if not model.rollout.n_gpus:
        # No compiler is needed, and the first request doesn't wait for one.
        env |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "REPERTORY_VLLM_FORK": "1",
        }
        env |= {"OMP_NUM_THREADS": str(model.rollout.num_threads)}
    elif gpu_ids:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    return env


def max_lora_rank(model: ModelConfig) -> int:
    """The rank the servers make room for: the config's, or that of the adapter started from."""
    rank = int(model.lora.rank)
    if model.adapter_path is not None:
        settings = json.loads((Path(model.adapter_path) / "adapter_config.json").read_text())
        rank = max(rank, int(settings["r"])) if model.kind == "trainable" else int(settings["r"])
    allowed = sorted(get_args(LoRARank))
    for candidate in allowed:
        if candidate >= rank:
            return candidate
    raise RolloutServerError(f"{model.adapter_path}: rank {rank} is more than vLLM serves ({allowed[-1]})")


def check_paths(model: ModelConfig) -> None:
    """Raise RolloutServerError naming the model file that is missing."""
    wanted = [("model_path", model.model_path, "config.json")]
    if model.adapter_path is not None:
        wanted.append(("adapter_path", model.adapter_path, "adapter_config.json"))
    for field, folder, file in wanted:
        if not (Path(folder) / file).is_file():
            raise RolloutServerError(
                f"model {model.model_id!r}: {field} is {folder!r}, where there is no {file}; "
                "it must be a local folder in Hugging Face's format"
            )
    if model.sft is not None and not Path(model.sft.data).is_file():
        raise RolloutServerError(
            f"model {model.model_id!r}: sft.data is {model.sft.data!r}, which is no file"
        )
