"""Which GPU serves or trains which model: a pure assignment, and the check against this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model_runtime.config import ModelConfig, RolloutConfig, TrainerConfig
from model_runtime.errors import ConfigError

# Shares like 0.3 + 0.7 must fit one device in spite of their rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """Device ids of one model's two parts."""

    rollout: tuple[int, ...] = ()
    trainer: tuple[int, ...] = ()


def assign_gpus(models: Sequence[ModelConfig]) -> dict[str, ModelDevices]:
    """Devices per model. `gpu_ids` are honoured; every other part takes, in the order of the config and
    rollout before trainer, the lowest devices with room: the whole device, or its `gpu_memory_fraction`."""
    used: dict[int, float] = {}
    for _, _, section in _parts(models):
        for gpu in section.gpu_ids or ():
            used[gpu] = used.get(gpu, 0.0) + _share(section)
    assigned: dict[tuple[str, str], tuple[int, ...]] = {}
    for model_id, part, section in _parts(models):
        if section.gpu_ids is None:
            assigned[model_id, part] = _take(used, section.n_gpus, _share(section))
        else:
            assigned[model_id, part] = tuple(section.gpu_ids)
    return {
        model.model_id: ModelDevices(
            rollout=assigned[model.model_id, "rollout"], trainer=assigned[model.model_id, "trainer"]
        )
        for model in models
    }


def check_gpus(model_id: str, devices: ModelDevices, visible: int) -> None:
    """Raises ConfigError when this machine shows fewer GPUs than the model was assigned."""
    for part, ids in (("rollout", devices.rollout), ("trainer", devices.trainer)):
        missing = [gpu for gpu in ids if gpu >= visible]
        if missing:
            raise ConfigError(
                f"{model_id}.{part}: needs GPU {missing[0]}, but this machine shows {visible}. "
                "Lower n_gpus, set gpu_memory_fraction on the parts that may share a device, or name gpu_ids"
            )


def visible_gpus(environ: Mapping[str, str] | None = None, device_folder: Path = Path("/dev")) -> int:
    """How many NVIDIA devices a process started here sees; asks no library, so nothing is initialised."""
    listed = _listed(environ)
    if listed is not None:
        return len(listed)
    return sum(1 for path in device_folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def cuda_numbers(gpu_ids: Sequence[int], environ: Mapping[str, str] | None = None) -> list[int]:
    """What a child's CUDA_VISIBLE_DEVICES must name: `gpu_ids` count within the devices this process itself
    was given. Ids beyond those stay as they are; `check_gpus` speaks of them."""
    listed = _listed(environ)
    if listed is None or not gpu_ids:
        return list(gpu_ids)
    if not all(name.isdecimal() for name in listed):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES is {','.join(listed)!r}: name the devices by number")
    return [int(listed[gpu]) if gpu < len(listed) else gpu for gpu in gpu_ids]


def _listed(environ: Mapping[str, str] | None) -> list[str] | None:
    """Devices in CUDA_VISIBLE_DEVICES; None when it is not set and all are visible."""
    value = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [name.strip() for name in value.split(",") if name.strip() and name.strip() != "-1"]


def _parts(models: Sequence[ModelConfig]) -> Iterator[tuple[str, str, RolloutConfig | TrainerConfig]]:
    for model in models:
        yield model.model_id, "rollout", model.rollout
        yield model.model_id, "trainer", model.trainer


def _share(section: RolloutConfig | TrainerConfig) -> float:
    return 1.0 if section.gpu_memory_fraction is None else section.gpu_memory_fraction


def _take(used: dict[int, float], count: int, share: float) -> tuple[int, ...]:
    taken: list[int] = []
    gpu = 0
    while len(taken) < count:
        if used.get(gpu, 0.0) + share <= 1.0 + _ROUNDING:
            used[gpu] = used.get(gpu, 0.0) + share
            taken.append(gpu)
        gpu += 1
    return tuple(taken)
