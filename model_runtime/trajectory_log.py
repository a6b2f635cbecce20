"""The format of one shard of a model's log: Parquet rows are trajectories, settlements stand beside them.

One row per trajectory; arrays are lists, rewards are maps from component to a nullable value. The
settlements are JSON in the file's key-value metadata, because a shard may announce executions that have no
row here. A sha256 over the whole file, in the metadata too, finds every truncated or flipped byte: Parquet's
own page checksums cover neither the footer nor the settlements.

Readers ignore columns they don't know, and shards are never rewritten, so a newer writer's columns survive;
`read_table` shows them.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model_runtime.errors import CorruptObjectError, InvalidTrajectoryError
from model_runtime.types import MemberKey, RefusedRow, Settlement, Shard, Trajectory, Turn

logger = logging.getLogger(__name__)

_SETTLEMENTS = b"repertory.settlements"
_SHA256 = b"repertory.sha256"
_UNSEALED = b"0" * 64
# As Thrift's compact protocol writes the key and its value: a string field (0x18) of 64 (0x40) bytes.
_SEAL = re.compile(re.escape(_SHA256) + rb"\x18\x40([0-9a-f]{64})")

_REWARDS = pa.map_(pa.string(), pa.float64())
_SETTINGS = pa.map_(pa.string(), pa.string())
_VERSION_RANGE = pa.struct([("min", pa.int32()), ("max", pa.int32())])
_TURN_TYPES: dict[str, pa.DataType] = {
    "turn_index": pa.int32(),
    "start": pa.int32(),
    "end": pa.int32(),
    "request_id": pa.string(),
    "version_min": pa.int32(),
    "version_max": pa.int32(),
    "finish_reason": pa.string(),
    "temperature": pa.float64(),
    "top_p": pa.float64(),
    "top_k": pa.int32(),
    "logprobs_mode": pa.string(),
    "rewards": _REWARDS,
    "started_at": pa.float64(),
    "ended_at": pa.float64(),
    "off_policy": _SETTINGS,
}
_MEMBER_TYPES: dict[str, pa.DataType] = {
    "group_id": pa.string(),
    "group_size": pa.int32(),
    "member_index": pa.int32(),
    "attempt": pa.int32(),
}
_SCALAR_TYPES: dict[str, pa.DataType] = {
    "trajectory_id": pa.string(),
    "run_id": pa.string(),
    "session_id": pa.string(),
    "agent_id": pa.string(),
    "model_id": pa.string(),
    "chain_index": pa.int32(),
    "parent_trajectory_id": pa.string(),
    "request_id": pa.string(),
    "policy_version": pa.int32(),
    "policy_version_max": pa.int32(),
    "train": pa.bool_(),
    "created_at": pa.float64(),
    "schema_version": pa.int32(),
}
_ARRAY_DTYPES: dict[str, type[np.generic]] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "response_mask": np.int8,
    "behavior_logprobs": np.float32,
    "token_versions": np.int32,
}
_REWARD_COLUMNS = ("workflow_rewards", "agent_rewards")

# Dictionaries pay off for everything but logprobs, which are nearly all different.
_DICTIONARY = [*_SCALAR_TYPES, *_MEMBER_TYPES, "workflow_id"] + [
    f"{name}.list.element" for name in _ARRAY_DTYPES if name != "behavior_logprobs"
]

_WRITER_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": _DICTIONARY,
    "use_byte_stream_split": ["behavior_logprobs.list.element"],
    "write_page_checksum": True,
    "store_schema": False,
}


def encode_shard(shard: Shard) -> bytes:
    """The shard's bytes; equal shards give equal bytes."""
    settlements = msgspec.json.encode(list(shard.settlements))
    return write_table(_to_table(shard.trajectories), settlements)


def decode_shard(data: bytes, *, source: str) -> Shard:
    """The records in the bytes. Raises CorruptObjectError, naming `source`, for bytes that were damaged or
    don't hold a shard. A record that breaks an invariant is refused and reported in `Shard.refused`."""
    table, settlements = _open(data, source=source)
    try:
        records = msgspec.json.decode(settlements, type=list[Settlement])
        trajectories, refused = _from_table(table)
    except (msgspec.MsgspecError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise CorruptObjectError(f"{source}: not a shard: {type(error).__name__}: {error}") from error
    for row in refused:
        logger.error("%s: refused a record: %s", source, row.reason)
    return Shard(trajectories, tuple(records), tuple(refused))


def read_table(data: bytes, *, source: str) -> pa.Table:
    """All columns of a shard, also those this version doesn't know. Raises CorruptObjectError."""
    return _open(data, source=source)[0]


def write_table(table: pa.Table, settlements: bytes) -> bytes:
    """A table and the settlements' JSON as a sealed shard."""
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, table.schema, **_WRITER_OPTIONS) as writer:
        writer.write_table(table)
        # The seal comes last, so that its place is found from the end of the file.
        writer.add_key_value_metadata({_SETTLEMENTS: settlements, _SHA256: _UNSEALED})
    return _sealed(buffer.getvalue())


def _sealed(data: bytes) -> bytes:
    start, end = _seal_position(data, source="shard")
    return data[:start] + _digest(data, start, end) + data[end:]


def _seal_position(data: bytes, *, source: str) -> tuple[int, int]:
    at = data.rfind(_SHA256)
    match = _SEAL.match(data, at) if at >= 0 else None
    if match is None:
        raise CorruptObjectError(f"{source}: not a shard, or cut short: no checksum in {len(data)} bytes")
    return match.span(1)


def _digest(data: bytes, start: int, end: int) -> bytes:
    """sha256 of the file with the seal's own place zeroed."""
    digest = hashlib.sha256(data[:start])
    digest.update(_UNSEALED)
    digest.update(data[end:])
    return digest.hexdigest().encode()


def _open(data: bytes, *, source: str) -> tuple[pa.Table, bytes]:
    start, end = _seal_position(data, source=source)
    if _digest(data, start, end) != data[start:end]:
        raise CorruptObjectError(f"{source}: its {len(data)} bytes do not match their sha256")
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            return file.read(), (file.metadata.metadata or {})[_SETTLEMENTS]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise CorruptObjectError(f"{source}: not a shard: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------ records → columns


def _to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    columns: dict[str, pa.Array] = {}

    def add(name: str, kind: pa.DataType, value: Callable[[Trajectory], Any]) -> None:
        columns[name] = pa.array([value(t) for t in trajectories], type=kind)

    for name, kind in _SCALAR_TYPES.items():
        add(name, kind, lambda t, name=name: getattr(t, name))
    for name, kind in _MEMBER_TYPES.items():
        add(name, kind, lambda t, name=name: getattr(t.member, name))
    add("workflow_id", pa.string(), lambda t: t.member.workflow_id)
    for name, dtype in _ARRAY_DTYPES.items():
        columns[name] = _list_array([getattr(t, name) for t in trajectories], dtype)
    for name in _REWARD_COLUMNS:
        add(name, _REWARDS, lambda t, name=name: list(getattr(t, name).items()))
    add("partner_versions", pa.map_(pa.string(), _VERSION_RANGE), _partner_items)
    add("turns", pa.list_(pa.struct(list(_TURN_TYPES.items()))), lambda t: [_turn_row(x) for x in t.turns])
    return pa.table(columns)


def _list_array(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(dtype, copy=False)))


def _partner_items(t: Trajectory) -> list[tuple[str, dict[str, int]]]:
    return [(model, {"min": low, "max": high}) for model, (low, high) in t.partner_versions.items()]


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in _TURN_TYPES}
    return row | {"rewards": list(turn.rewards.items()), "off_policy": list(turn.off_policy.items())}


# ------------------------------------------------------------------ columns → records


def _from_table(table: pa.Table) -> tuple[tuple[Trajectory, ...], list[RefusedRow]]:
    arrays = {name: _numpy_rows(table[name], dtype) for name, dtype in _ARRAY_DTYPES.items()}
    others = [*_SCALAR_TYPES, *_MEMBER_TYPES, *_REWARD_COLUMNS, "partner_versions", "turns"]
    trajectories: list[Trajectory] = []
    refused: list[RefusedRow] = []
    for i, row in enumerate(table.select(others).to_pylist()):
        member = MemberKey(**{name: row.pop(name) for name in _MEMBER_TYPES})
        try:
            trajectories.append(_trajectory(row, member, {name: rows[i] for name, rows in arrays.items()}))
        except InvalidTrajectoryError as error:
            refused.append(RefusedRow(row["trajectory_id"], member, row["agent_id"], str(error)))
    return tuple(trajectories), refused


def _trajectory(row: dict[str, Any], member: MemberKey, arrays: dict[str, np.ndarray]) -> Trajectory:
    values: dict[str, Any] = {name: row[name] for name in _SCALAR_TYPES}
    values |= {name: dict(row[name]) for name in _REWARD_COLUMNS}
    values.update(arrays)
    return Trajectory(
        member=member,
        turns=tuple(_turn(turn) for turn in row["turns"]),
        partner_versions={model: (r["min"], r["max"]) for model, r in row["partner_versions"]},
        **values,
    )


def _turn(row: dict[str, Any]) -> Turn:
    values: dict[str, Any] = {name: row[name] for name in _TURN_TYPES if name in row}
    values["rewards"] = dict(row["rewards"])
    values["off_policy"] = dict(row.get("off_policy") or ())  # shards of earlier versions don't have it
    return Turn(**values)


def _numpy_rows(column: pa.ChunkedArray, dtype: type[np.generic]) -> list[np.ndarray]:
    """One array per row, each with memory of its own, so that a row kept doesn't keep the whole shard."""
    rows: list[np.ndarray] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        values = chunk.values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        rows += [values[a:b].copy() for a, b in itertools.pairwise(offsets)]
    return rows
