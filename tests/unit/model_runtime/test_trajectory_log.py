from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime import trajectory_log
from model_runtime.errors import CorruptObjectError
from model_runtime.trajectory_log import decode_shard, encode_shard, read_table, write_table
from model_runtime.types import Settlement, Shard, Trajectory, Turn
from tests.fakes import make_member, make_settlement, make_trajectory

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "behavior_logprobs", "token_versions")


def assert_same(found: Shard, wanted: Shard) -> None:
    """Equal in every field, arrays in every bit and in type."""
    assert found.settlements == wanted.settlements
    assert found.refused == ()
    assert len(found.trajectories) == len(wanted.trajectories)
    for a, b in zip(found.trajectories, wanted.trajectories, strict=True):
        for field in dataclasses.fields(Trajectory):
            left, right = getattr(a, field.name), getattr(b, field.name)
            if field.name in ARRAYS:
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes()
            else:
                assert left == right, field.name
                assert type(left) is type(right), field.name


def rich_shard() -> Shard:
    first = make_trajectory(
        mask=[1, 1, 0, 0, 1],
        workflow_rewards={"reward": 0.1, "late": None},
        agent_rewards={"style": -1.5},
        partner_versions={"solver_model": (2, 7), "judge_model": (0, 0)},
        parent_trajectory_id="abc",
        train=False,
    )
    turns = (
        dataclasses.replace(
            first.turns[0],
            rewards={"tool": None, "reward": 1 / 3},
            finish_reason="length",
            off_policy={"top_p": "0.9", "tool_choice": '"required"'},
        ),
        first.turns[1],
    )
    second = make_trajectory(member_index=3, attempt=1, agent_id="antwort_агент", version=41)
    settlements = (
        make_settlement(num_rows={"planner_agent": 1}),
        make_settlement(
            member_index=1, status="expired", num_rows={}, reason="no answer in 300 s", train=False
        ),
    )
    return Shard((dataclasses.replace(first, turns=turns), second), settlements)


def test_a_shard_comes_back_exactly() -> None:
    assert_same(decode_shard(encode_shard(rich_shard()), source="s"), rich_shard())


def test_equal_shards_have_equal_bytes_also_after_a_round_trip() -> None:
    data = encode_shard(rich_shard())
    assert encode_shard(rich_shard()) == data
    assert encode_shard(decode_shard(data, source="s")) == data


def test_a_reward_that_never_came_is_not_zero() -> None:
    shard = Shard((make_trajectory(workflow_rewards={"reward": None}, agent_rewards={"reward": 0.0}),))
    (read,) = decode_shard(encode_shard(shard), source="s").trajectories
    assert read.workflow_rewards == {"reward": None}
    assert read.agent_rewards == {"reward": 0.0}


def test_a_shard_of_before_turns_had_settings_off_the_policy_is_read() -> None:
    shard = Shard((make_trajectory(),))
    table = read_table(encode_shard(shard), source="s")
    turns = [
        [{k: v for k, v in t.items() if k != "off_policy"} for t in row] for row in table["turns"].to_pylist()
    ]
    fields = [f for f in table.schema.field("turns").type.value_type if f.name != "off_policy"]
    older = pa.array(turns, type=pa.list_(pa.struct(fields)))
    table = table.set_column(table.schema.get_field_index("turns"), "turns", older)
    assert_same(decode_shard(write_table(table, b"[]"), source="s"), shard)


@pytest.mark.parametrize("shard", [Shard(), Shard((), (make_settlement(num_rows={}, status="aborted"),))])
def test_a_shard_may_hold_only_settlements_or_nothing(shard: Shard) -> None:
    assert decode_shard(encode_shard(shard), source="s") == shard


def test_arrays_read_own_their_memory() -> None:
    """A row kept in a queue must not keep the whole shard alive."""
    (row,) = decode_shard(encode_shard(Shard((make_trajectory(),))), source="s").trajectories
    assert all(getattr(row, name).base is None for name in ARRAYS)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, -100, -9, -8, -1])
def test_truncated_bytes_are_found(kept: int) -> None:
    data = encode_shard(rich_shard())
    with pytest.raises(CorruptObjectError, match=r"run/log/7\.parquet"):
        decode_shard(data[:kept], source="run/log/7.parquet")


def test_every_flipped_bit_is_found() -> None:
    data = bytearray(encode_shard(Shard((make_trajectory(),), (make_settlement(),))))
    for at in range(len(data)):
        data[at] ^= 1 << (at % 8)
        with pytest.raises(CorruptObjectError):
            decode_shard(bytes(data), source="s")
        data[at] ^= 1 << (at % 8)
    assert decode_shard(bytes(data), source="s").trajectories


@pytest.mark.parametrize("data", [b"", b"PAR1", b"{}", b"x" * 1000])
def test_other_bytes_are_no_shard(data: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="s: not a shard"):
        decode_shard(data, source="s")


def test_a_table_with_columns_missing_is_no_shard() -> None:
    table = read_table(encode_shard(Shard((make_trajectory(),))), source="s")
    with pytest.raises(CorruptObjectError, match="turns"):
        decode_shard(write_table(table.drop_columns(["turns"]), b"[]"), source="s")


@pytest.mark.parametrize("settlements", [b"", b"{}", b'[{"member": 3}]'])
def test_settlements_that_are_none_make_no_shard(settlements: bytes) -> None:
    table = read_table(encode_shard(Shard((make_trajectory(),))), source="s")
    with pytest.raises(CorruptObjectError, match="not a shard"):
        decode_shard(write_table(table, settlements), source="s")


def test_unknown_columns_and_settlement_fields_of_a_newer_writer_are_kept_and_do_no_harm() -> None:
    shard = rich_shard()
    table = read_table(encode_shard(shard), source="s").append_column("flops", pa.array([1, 2]))
    json = b'[{"member":{"group_id":"g","group_size":2,"member_index":0,"attempt":0,"lane":1},'
    json += b'"status":"finalized","num_rows":{},"train":true,"cost":3}]'

    data = write_table(table, json)

    read = decode_shard(data, source="s")
    assert_same(Shard(read.trajectories), Shard(shard.trajectories))
    assert read.settlements == (
        Settlement(
            member=make_member(group_id="g", group_size=2), status="finalized", num_rows={}, train=True
        ),
    )
    assert read_table(data, source="s")["flops"].to_pylist() == [1, 2]


def test_a_record_that_breaks_an_invariant_is_refused_and_its_neighbours_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = make_trajectory(member_index=0), make_trajectory(member_index=1)
    table = read_table(encode_shard(Shard((bad, good))), source="s")
    broken = [[0.5, -0.5, -0.5], table["behavior_logprobs"][1].as_py()]
    at = table.column_names.index("behavior_logprobs")
    table = table.set_column(at, "behavior_logprobs", pa.array(broken, type=pa.list_(pa.float32())))

    read = decode_shard(write_table(table, b"[]"), source="run/log/7.parquet")

    assert [t.trajectory_id for t in read.trajectories] == [good.trajectory_id]
    (refused,) = read.refused
    assert (refused.trajectory_id, refused.member, refused.agent_id) == (
        bad.trajectory_id,
        bad.member,
        bad.agent_id,
    )
    assert "positive" in refused.reason
    assert "run/log/7.parquet" in caplog.text


def test_every_field_of_the_records_is_a_column() -> None:
    table = read_table(encode_shard(Shard((make_trajectory(),))), source="s")
    wanted = {f.name for f in dataclasses.fields(Trajectory)} - {"member"}
    assert wanted | {"group_id", "group_size", "member_index", "attempt", "workflow_id"} == set(
        table.column_names
    )
    assert {f.name for f in table.schema.field("turns").type.value_type} == {
        f.name for f in dataclasses.fields(Turn)
    }


def test_the_format_stays_small_on_realistic_rows() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(50):
        base = make_trajectory(member_index=i, mask=[1] * 2000)
        ids = np.minimum(rng.zipf(1.3, 2000), 100_000).astype(np.int32)
        logprobs = -rng.exponential(1.0, 2000).astype(np.float32)
        rows.append(dataclasses.replace(base, response_ids=ids, behavior_logprobs=logprobs))
    raw = sum(row.nbytes for row in rows)
    assert len(encode_shard(Shard(tuple(rows)))) < 0.5 * raw


# ------------------------------------------------------------------ any shard

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
floats = st.floats(allow_nan=False, width=64)
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
rewards = st.dictionaries(names, st.none() | finite, max_size=3)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = [*draw(st.lists(st.integers(0, 1), max_size=12)), 1]
    version = draw(st.integers(0, 2**31 - 1))
    base = make_trajectory(
        group_id=draw(names),
        member_index=draw(st.integers(0, 2**31 - 1)),
        mask=mask,
        version=version,
        prompt_ids=np.asarray(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)), np.int32),
        workflow_rewards=draw(rewards),
        agent_rewards=draw(rewards),
        partner_versions=draw(
            st.dictionaries(names, st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2)
        ),
        parent_trajectory_id=draw(st.none() | names),
        train=draw(st.booleans()),
        created_at=draw(floats),
    )
    turns = tuple(dataclasses.replace(t, rewards=draw(rewards), started_at=draw(floats)) for t in base.turns)
    chosen: Any = draw(st.lists(st.floats(-(2.0**60), 0, width=32), min_size=len(mask), max_size=len(mask)))
    logprobs = np.where(base.response_mask == 1, np.asarray(chosen, np.float32), np.float32(0))
    return dataclasses.replace(base, turns=turns, behavior_logprobs=logprobs.astype(np.float32))


settlements_ = st.builds(
    Settlement,
    member=st.builds(make_member, group_id=names, group_size=st.integers(1, 99), attempt=st.integers(0, 9)),
    status=st.sampled_from(["finalized", "aborted", "expired", "infra", "retried"]),
    num_rows=st.dictionaries(names, st.integers(0, 9), max_size=2),
    train=st.booleans(),
    reason=st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
    | st.just("0" * 64 + "repertory.sha256"),
    settled_at=st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), max_size=4), st.lists(settlements_, max_size=3))
def test_any_shard_comes_back_exactly(rows: list[Trajectory], ends: list[Settlement]) -> None:
    shard = Shard(tuple(rows), tuple(ends))
    assert_same(decode_shard(encode_shard(shard), source="s"), shard)


def test_the_seal_is_found_where_it_stands_whatever_the_settlements_say() -> None:
    trap = "repertory.sha256\x18\x40" + "0" * 64
    shard = Shard((), (make_settlement(num_rows={}, reason=trap),))
    data = encode_shard(shard)
    assert decode_shard(data, source="s") == shard
    assert data.count(trajectory_log._UNSEALED) == 1
