"""The two files between a runtime and its trainer."""

import time

import pytest

from model_runtime import mailbox as module
from model_runtime.errors import CorruptObjectError
from model_runtime.mailbox import TrainerMailbox
from model_runtime.protocol import CONTROL_FILE, STATUS_FILE, TrainerControl, TrainerStatus
from tests.fakes import FullDisk


def read(folder):
    return TrainerStatus.model_validate_json((folder / STATUS_FILE).read_bytes())


@pytest.fixture
def fast_heartbeat(monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.02)


def wait_until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_orders_the_trainer_runs(tmp_path):
    assert TrainerMailbox(tmp_path).control() == TrainerControl()


def test_orders_are_read_afresh(tmp_path):
    mailbox = TrainerMailbox(tmp_path)
    for version in (1, 2):
        (tmp_path / CONTROL_FILE).write_text(TrainerControl(published_version=version).model_dump_json())
        assert mailbox.control().published_version == version


def test_orders_that_are_no_orders_are_refused_by_name(tmp_path):
    (tmp_path / CONTROL_FILE).write_text('{"desired": "dance"}')
    with pytest.raises(CorruptObjectError, match=CONTROL_FILE):
        TrainerMailbox(tmp_path).control()


def test_the_status_is_written_at_every_change(tmp_path):
    with TrainerMailbox(tmp_path) as mailbox:
        assert read(tmp_path).state == "loading"
        mailbox.report(state="running", step=3)
        assert (read(tmp_path).state, read(tmp_path).step) == ("running", 3)


def test_an_unchanged_status_is_not_written_again(tmp_path):
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.report(step=3)
        before = (tmp_path / STATUS_FILE).stat().st_mtime_ns
        mailbox.report(step=3)
        assert (tmp_path / STATUS_FILE).stat().st_mtime_ns == before


def test_the_heart_beats_while_the_main_thread_works(tmp_path, fast_heartbeat):
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.working(for_s=30)
        before = read(tmp_path).heartbeat_at
        deadline = time.monotonic() + 10
        while read(tmp_path).heartbeat_at == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_main_thread_that_is_overdue_falls_silent(tmp_path, fast_heartbeat):
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.working(for_s=0)
        before = read(tmp_path).heartbeat_at
        time.sleep(0.2)
        assert read(tmp_path).heartbeat_at == before


def test_the_heart_beats_on_when_a_full_disk_has_room_again(tmp_path, fast_heartbeat, monkeypatch):
    disk = FullDisk(monkeypatch)
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.working(for_s=30)
        disk.full = True
        wait_until(lambda: disk.num_refused > 2)
        before = read(tmp_path).heartbeat_at
        disk.full = False
        wait_until(lambda: read(tmp_path).heartbeat_at > before)


def test_a_report_a_full_disk_did_not_take_is_written_when_it_has_room(tmp_path, fast_heartbeat, monkeypatch):
    disk = FullDisk(monkeypatch)
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.working(for_s=0)
        disk.full = True
        mailbox.report(state="running", step=3)
        disk.full = False
        wait_until(lambda: read(tmp_path).step == 3)


def test_a_trainer_that_ends_waits_until_its_last_words_are_written(tmp_path, fast_heartbeat, monkeypatch):
    disk = FullDisk(monkeypatch)
    with TrainerMailbox(tmp_path) as mailbox:
        mailbox.working(for_s=0)
        disk.full = True
        mailbox.report(state="finished")
        monkeypatch.setattr(module.time, "sleep", lambda _: setattr(disk, "full", False))
    assert read(tmp_path).state == "finished"


def test_a_disk_that_stays_full_does_not_hold_up_the_end(tmp_path, fast_heartbeat, monkeypatch):
    monkeypatch.setattr(module, "LAST_WORDS_S", 0.1)
    disk = FullDisk(monkeypatch)
    with TrainerMailbox(tmp_path) as mailbox:
        disk.full = True
        mailbox.report(state="finished")
    assert read(tmp_path).state == "loading"
