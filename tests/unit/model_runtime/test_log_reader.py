"""Reading ahead saves time and changes nothing: every shard once, in order, damaged ones set aside."""

import pytest

from model_runtime.errors import StoreUnavailableError
from model_runtime.layout import RunLayout
from model_runtime.log_reader import LogReader
from model_runtime.patient_store import PatientStore
from model_runtime.trajectory_log import encode_shard
from model_runtime.types import Settlement, Shard
from tests.memory_store import MemoryStore
from tests.training_log import AGENT_ID, make_groups

LAYOUT = RunLayout("run").model("planner")


class CountingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, key):
        data = super().get(key)
        self.read.append(key)
        return data


@pytest.fixture
def store():
    return CountingStore()


def write(store, writer, seq):
    (rows,) = make_groups(1, first=seq)
    settlements = [
        Settlement(member=r.member, status="finalized", num_rows={AGENT_ID: 1}, train=True) for r in rows
    ]
    store.put(LAYOUT.log_shard(writer, seq), encode_shard(Shard(tuple(rows), tuple(settlements))))


def positions(reader):
    return [position for position, _ in reader.new_shards()]


def test_shards_read_ahead_are_not_read_again_and_later_ones_are_found(store):
    reader = LogReader(store, LAYOUT)
    for seq in range(2):
        write(store, "w0", seq)
        write(store, "w1", seq)
    reader.prefetch()
    reader._ahead._thread.join(10)
    assert len(store.read) == 4
    write(store, "w0", 2)
    assert positions(reader) == [("w0", 0), ("w0", 1), ("w0", 2), ("w1", 0), ("w1", 1)]
    assert len(store.read) == 5
    assert positions(reader) == []


def test_a_damaged_shard_ends_reading_ahead_and_is_set_aside_by_the_reader(store):
    reader = LogReader(store, LAYOUT)
    write(store, "w0", 0)
    store.put(LAYOUT.log_shard("w0", 1), b"damaged")
    write(store, "w0", 2)
    reader.prefetch()
    assert positions(reader) == [("w0", 0), ("w0", 2)]
    assert list(reader.quarantined) == [("w0", 1)]


class AwayOnce(CountingStore):
    """The first look at the log fails."""

    def __init__(self):
        super().__init__()
        self.failures = 1

    def children(self, prefix):
        if self.failures:
            self.failures -= 1
            raise StoreUnavailableError("children: no answer")
        return super().children(prefix)


def test_who_reads_a_whole_log_waits_for_the_store_and_who_tails_it_does_not():
    away = AwayOnce()
    write(away, "w0", 0)
    store = PatientStore(away, max_outage_s=60)
    assert positions(LogReader(store, LAYOUT)) == [("w0", 0)]

    away.failures = 1
    tailing = LogReader(store, LAYOUT, tail=store.at_once())
    with pytest.raises(StoreUnavailableError):
        positions(tailing)
    assert positions(tailing) == [("w0", 0)]
