"""Adapter versions in the store, in PEFT's own format: what vLLM loads and what `peft` loads are the same
two files. A version exists once its VERSION.json does.

Needs numpy and safetensors only, so that the processes that move adapters never load torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from model_runtime.documents import CanaryProbe, VersionDocument
from model_runtime.errors import (
    ConfigError,
    CorruptObjectError,
    ObjectExistsError,
    ObjectNotFoundError,
    StoreError,
)
from model_runtime.layout import VERSION_MARKER, ModelLayout, RunLayout, number_in
from model_runtime.store import Store

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

Tensors = Mapping[str, npt.NDArray[np.float32]]

_LORA_KEY = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
_NOT_SERVED = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe", "word_embeddings")
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files of a PEFT adapter, as bytes."""

    weights: bytes  # adapter_model.safetensors
    config: bytes  # adapter_config.json

    @property
    def sha256(self) -> str:
        return _sha256(self.weights)

    @property
    def config_sha256(self) -> str:
        return _sha256(self.config)


def pack(tensors: Tensors, config: Mapping[str, Any]) -> AdapterFiles:
    """The files of these tensors. The same tensors and settings always give the same bytes."""
    ordered = {name: np.ascontiguousarray(tensors[name], dtype=np.float32) for name in sorted(tensors)}
    weights = safetensors.numpy.save(ordered, metadata={"format": "pt"})
    return AdapterFiles(weights, json.dumps(dict(config), indent=2, sort_keys=True).encode())


def read_folder(folder: str | Path) -> AdapterFiles:
    """A local PEFT adapter, checked. Raises ConfigError naming the folder and what is wrong with it."""
    folder = Path(folder)
    try:
        files = AdapterFiles((folder / WEIGHTS_FILE).read_bytes(), (folder / CONFIG_FILE).read_bytes())
    except OSError as error:
        raise ConfigError(f"adapter {folder}: can't read {error.filename}: {error.strerror}") from error
    try:
        check_adapter(files, source=str(folder))
    except CorruptObjectError as error:
        raise ConfigError(str(error)) from error
    return files


def check_adapter(files: AdapterFiles, *, source: str) -> dict[str, npt.NDArray[np.float32]]:
    """The adapter's tensors as float32, after checking that it is plain LoRA and whole.

    Raises ConfigError for a kind of adapter that is not served, CorruptObjectError when tensors are
    missing, odd, or not finite.
    """
    try:
        config = json.loads(files.config)
        raw = safetensors.deserialize(files.weights)
    except (ValueError, safetensors.SafetensorError) as error:
        raise CorruptObjectError(f"{source}: not a PEFT adapter: {error}") from None
    if not isinstance(config, dict):
        raise CorruptObjectError(f"{source}/{CONFIG_FILE}: not a JSON object")
    refuse_other_than_plain_lora(config, source=source)
    shape = _lora_shape(config, source=source)
    tensors = {name: _as_float32(name, info, source=source) for name, info in raw}
    _check_pairs(tensors, shape, source=source)
    return tensors


class _LoraShape(BaseModel):
    """What of adapter_config.json decides which tensors there are and how they are scaled."""

    model_config = ConfigDict(extra="ignore", strict=True)

    r: int = Field(gt=0)
    lora_alpha: float = Field(default=8, gt=0, allow_inf_nan=False)  # PEFT's own default
    target_modules: str | list[str] = Field(min_length=1)


def _lora_shape(config: Mapping[str, Any], *, source: str) -> _LoraShape:
    try:
        return _LoraShape.model_validate(config)
    except ValidationError as error:
        wrong = error.errors()[0]
        field = str(wrong["loc"][0])
        raise CorruptObjectError(
            f"{source}/{CONFIG_FILE}: {field} is {config.get(field)!r}: {wrong['msg']}"
        ) from None


def refuse_other_than_plain_lora(config: Mapping[str, Any], *, source: str) -> None:
    """Raise ConfigError naming the setting that the rollout server would not honour."""
    unwanted = {
        "peft_type": config.get("peft_type", "LORA") != "LORA",
        "use_dora": bool(config.get("use_dora")),
        "bias": config.get("bias", "none") != "none",
        "lora_bias": bool(config.get("lora_bias")),
        "modules_to_save": bool(config.get("modules_to_save")),
        "rank_pattern": bool(config.get("rank_pattern")),
        "alpha_pattern": bool(config.get("alpha_pattern")),
        "trainable_token_indices": bool(config.get("trainable_token_indices")),
        "target_parameters": bool(config.get("target_parameters")),
        "layer_replication": bool(config.get("layer_replication")),
    }
    for name, present in unwanted.items():
        if present:
            raise ConfigError(f"{source}: {name} is {config[name]!r}; only plain LoRA is served")


def refuse_unserved_modules(modules: Iterable[str], *, source: str) -> None:
    """Raise ConfigError for resolved module names that are embeddings or the output head."""
    for module in modules:
        if module.rsplit(".", 1)[-1] in _NOT_SERVED:
            raise ConfigError(
                f"{source}: {module} is an embedding or output head; only linear layers are adapted"
            )


def write_version(
    store: Store,
    layout: ModelLayout,
    files: AdapterFiles,
    *,
    version: int,
    step: int,
    epoch: int,
    canary: Sequence[CanaryProbe] = (),
) -> VersionDocument:
    """Commit a version, marker last. The same adapter under the same number again is success.

    Raises ObjectExistsError when the number stands for another adapter: the caller then takes
    `next_free_version`.
    """
    tensors = check_adapter(files, source=store.uri(layout.version(version)))
    present = _marker(store, layout, version)
    if present is not None:
        return _same_or_refuse(present, files, uri=store.uri(layout.version(version)))
    folder = layout.version(version)
    store.put_if_absent(f"{folder}/{WEIGHTS_FILE}", files.weights)
    store.put_if_absent(f"{folder}/{CONFIG_FILE}", files.config)
    document = VersionDocument(
        version=version,
        step=step,
        epoch=epoch,
        sha256=files.sha256,
        num_bytes=len(files.weights),
        num_tensors=len(tensors),
        config_sha256=files.config_sha256,
        canary=list(canary),
        created_at=time.time(),
    )
    try:
        store.put_if_absent(layout.version_marker(version), document.to_bytes())
    except ObjectExistsError:
        present = _marker(store, layout, version)
        if present is None:
            raise
        return _same_or_refuse(present, files, uri=store.uri(folder))
    return document


def is_of(store: Store, layout: ModelLayout, files: AdapterFiles, *, version: int) -> bool:
    """Whether all that is there of a version, committed or only begun, is of this adapter."""
    present = _marker(store, layout, version)
    if present is not None:
        return (present.sha256, present.config_sha256) == (files.sha256, files.config_sha256)
    wanted = {WEIGHTS_FILE: files.weights, CONFIG_FILE: files.config}
    folder = layout.version(version)
    found = [name for name in store.children(folder) if name in wanted]
    return all(store.get(f"{folder}/{name}") == wanted[name] for name in found)


def version_document(store: Store, layout: ModelLayout, version: int) -> VersionDocument:
    """The version's marker. Raises ObjectNotFoundError when it is not committed."""
    key = layout.version_marker(version)
    return VersionDocument.parse(store.get(key), source=store.uri(key))


def version_folder(into: str | Path, version: int) -> Path:
    """Where `read_version` leaves the adapter's files."""
    return Path(into) / f"v{version}"


def fetch_version(store: Store, layout: ModelLayout, version: int) -> tuple[VersionDocument, AdapterFiles]:
    """A committed version's files, verified. Raises CorruptObjectError naming what doesn't match."""
    document = version_document(store, layout, version)
    folder = layout.version(version)
    files = AdapterFiles(store.get(f"{folder}/{WEIGHTS_FILE}"), store.get(f"{folder}/{CONFIG_FILE}"))
    _verify(files, document, source=store.uri(folder))
    return document, files


def read_version(store: Store, layout: ModelLayout, version: int, into: str | Path) -> VersionDocument:
    """Bring a committed version to `into/v<version>`, whole or not at all, and verify it.

    A local copy that is already right is kept untouched: a server may be reading it.
    """
    target = version_folder(into, version)
    document = version_document(store, layout, version)
    if _holds(target, document):
        return document
    document, files = fetch_version(store, layout, version)
    _place(target, files, document)
    return document


def latest_version(store: Store, layout: ModelLayout) -> int | None:
    """The newest committed version; None when there is none."""
    for version in sorted(_numbers(store, layout), reverse=True):
        if store.exists(layout.version_marker(version)):
            return version
    return None


def next_free_version(store: Store, layout: ModelLayout) -> int:
    """The number above every version, committed or only begun."""
    return max(_numbers(store, layout), default=-1) + 1


def export(
    store: Store, run_id: str, model_id: str, version: int | None, into: str | Path
) -> VersionDocument:
    """Write a version (None: the newest) to the folder `into`, ready for PEFT and vLLM.

    Raises ConfigError when there is no such version, or when `into` holds something else.
    """
    layout = RunLayout(run_id).model(model_id)
    if version is None:
        version = latest_version(store, layout)
    if version is None or not store.exists(layout.version_marker(version)):
        committed = [v for v in sorted(_numbers(store, layout)) if store.exists(layout.version_marker(v))]
        wanted = "no version" if version is None else f"no version {version}"
        raise ConfigError(
            f"run {run_id!r}, model {model_id!r}: {wanted} in {store.url}; committed: {committed}"
        )
    target = Path(into)
    document, files = fetch_version(store, layout, version)
    if _holds(target, document):
        return document
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; name a new folder for {model_id}@v{version}")
    _place(target, files, document)
    return document


def _numbers(store: Store, layout: ModelLayout) -> list[int]:
    return [number_in(name) for name in store.children(layout.versions()) if re.fullmatch(r"v\d+", name)]


def _marker(store: Store, layout: ModelLayout, version: int) -> VersionDocument | None:
    try:
        return version_document(store, layout, version)
    except ObjectNotFoundError:
        return None


def _same_or_refuse(present: VersionDocument, files: AdapterFiles, *, uri: str) -> VersionDocument:
    if (present.sha256, present.config_sha256) != (files.sha256, files.config_sha256):
        raise ObjectExistsError(
            f"{uri}: version {present.version} is already another adapter "
            f"(sha256 {present.sha256[:12]}, this one {files.sha256[:12]})"
        )
    return present


def _verify(files: AdapterFiles, document: VersionDocument, *, source: str) -> None:
    for name, got, want in (
        (WEIGHTS_FILE, files.sha256, document.sha256),
        (CONFIG_FILE, files.config_sha256, document.config_sha256),
    ):
        if got != want:
            raise CorruptObjectError(
                f"{source}/{name}: sha256 is {got[:12]}…, {VERSION_MARKER} says {want[:12]}…"
            )
    tensors = check_adapter(files, source=source)
    if len(tensors) != document.num_tensors:
        raise CorruptObjectError(
            f"{source}: {len(tensors)} tensors, {VERSION_MARKER} says {document.num_tensors}"
        )


def _holds(folder: Path, document: VersionDocument) -> bool:
    try:
        files = AdapterFiles((folder / WEIGHTS_FILE).read_bytes(), (folder / CONFIG_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (files.sha256, files.config_sha256) == (document.sha256, document.config_sha256)


def _place(target: Path, files: AdapterFiles, document: VersionDocument) -> None:
    """Write beside the target, then rename; a wrong or half-written folder of that name makes way."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            fresh, stale = Path(scratch) / "fresh", Path(scratch) / "stale"
            fresh.mkdir()
            (fresh / WEIGHTS_FILE).write_bytes(files.weights)
            (fresh / CONFIG_FILE).write_bytes(files.config)
            (fresh / VERSION_MARKER).write_bytes(document.to_bytes())
            if target.exists():
                os.replace(target, stale)
            os.replace(fresh, target)
    except OSError as error:
        raise StoreError(f"{target}: can't be written: {error.strerror}") from error


def _as_float32(name: str, info: Mapping[str, Any], *, source: str) -> npt.NDArray[np.float32]:
    if info["dtype"] == "BF16":  # numpy has no bfloat16: it is the upper half of a float32
        bits = np.frombuffer(info["data"], dtype=np.uint16).astype(np.uint32) << 16
        tensor = bits.view(np.float32)
    elif info["dtype"] in _DTYPES:
        tensor = np.frombuffer(info["data"], dtype=_DTYPES[info["dtype"]]).astype(np.float32)
    else:
        raise CorruptObjectError(f"{source}: tensor {name} has type {info['dtype']}; floats are expected")
    if not np.isfinite(tensor).all():
        raise CorruptObjectError(f"{source}: tensor {name} holds a value that is not finite")
    return tensor.reshape(info["shape"])


def _check_pairs(tensors: Tensors, shape: _LoraShape, *, source: str) -> None:
    """Every tensor belongs to a LoRA pair of the configured rank, and every target has one."""
    pairs: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
    for name, tensor in tensors.items():
        match = _LORA_KEY.match(name)
        if match is None:
            raise ConfigError(f"{source}: tensor {name} is not part of a plain LoRA adapter")
        pairs.setdefault(match["module"], {})[match["side"]] = tensor
    refuse_unserved_modules(pairs, source=source)
    rank = shape.r
    for module, sides in pairs.items():
        if set(sides) != {"A", "B"}:
            raise CorruptObjectError(f"{source}: {module} has lora_{'A' if 'A' in sides else 'B'} only")
        a, b = sides["A"], sides["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise CorruptObjectError(f"{source}: {module} has shapes {a.shape} and {b.shape}, rank is {rank}")
    targets = shape.target_modules
    wanted = [targets] if isinstance(targets, str) else targets
    missing = [t for t in wanted if not any(_targets(t, module) for module in pairs)]
    if missing or not pairs:
        raise CorruptObjectError(f"{source}: no tensors for the target modules {missing or wanted}")


def _targets(target: str, module: str) -> bool:
    """PEFT's rule: a name matches as a whole, as a dotted suffix, or as a full regular expression."""
    if module == target or module.endswith("." + target) or target == "all-linear":
        return True
    try:
        return re.fullmatch(target, module) is not None
    except re.error:
        return False


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
