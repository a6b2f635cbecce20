from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import ModelConfig
from model_runtime.devices import ModelDevices, assign_gpus, check_gpus, cuda_numbers, visible_gpus
from model_runtime.errors import ConfigError


def model(model_id: str, rollout: dict[str, Any], trainer: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(
        {"model_id": model_id, "model_path": "/m", "rollout": rollout, "trainer": trainer}
    )


def test_models_on_the_cpu_get_no_device() -> None:
    assert assign_gpus([model("a", {}, {})]) == {"a": ModelDevices()}


def test_parts_are_kept_apart_rollout_before_trainer() -> None:
    models = [model("a", {"n_gpus": 2}, {"n_gpus": 1}), model("b", {"n_gpus": 1}, {"n_gpus": 1})]
    assert assign_gpus(models) == {
        "a": ModelDevices(rollout=(0, 1), trainer=(2,)),
        "b": ModelDevices(rollout=(3,), trainer=(4,)),
    }


def test_named_devices_are_honoured_and_the_others_go_around_them() -> None:
    models = [
        model("a", {"n_gpus": 1}, {"n_gpus": 1}),
        model("b", {"n_gpus": 1, "gpu_ids": [0]}, {"n_gpus": 1}),
    ]
    assert assign_gpus(models) == {
        "a": ModelDevices(rollout=(1,), trainer=(2,)),
        "b": ModelDevices(rollout=(0,), trainer=(3,)),
    }


def test_fractions_that_sum_to_one_share_a_device() -> None:
    part = {"n_gpus": 1, "gpu_memory_fraction": 0.25}
    models = [model(name, part, part) for name in ("a", "b", "c")]
    assigned = assign_gpus(models)
    assert assigned["a"] == assigned["b"] == ModelDevices(rollout=(0,), trainer=(0,))
    assert assigned["c"] == ModelDevices(rollout=(1,), trainer=(1,))


def test_fractions_sum_to_one_in_spite_of_rounding() -> None:
    part = {"n_gpus": 1, "gpu_memory_fraction": 0.1}
    models = [model(f"m{i}", part, part) for i in range(5)]
    assert {gpu for d in assign_gpus(models).values() for gpu in d.rollout + d.trainer} == {0}


def test_too_few_devices_name_the_part_and_the_remedies() -> None:
    check_gpus("a", ModelDevices(rollout=(0,)), visible=1)
    with pytest.raises(ConfigError, match=r"a\.trainer: needs GPU 1, but this machine shows 1"):
        check_gpus("a", ModelDevices(rollout=(0,), trainer=(1,)), visible=1)


def test_visible_devices_are_those_listed_else_those_of_the_machine(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def test_children_are_given_devices_as_cuda_numbers_them() -> None:
    assert cuda_numbers([0, 1], {}) == [0, 1]
    assert cuda_numbers([1, 0], {"CUDA_VISIBLE_DEVICES": "4, 6"}) == [6, 4]
    assert cuda_numbers([], {"CUDA_VISIBLE_DEVICES": "GPU-abc"}) == []
    with pytest.raises(ConfigError, match="by number"):
        cuda_numbers([0], {"CUDA_VISIBLE_DEVICES": "GPU-abc"})
