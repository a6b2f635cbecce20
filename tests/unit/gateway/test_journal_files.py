"""The journal's files: what a process leaves that dies at any point of its work is read back whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway import journal_files as module
from gateway.journal_files import JournalFiles
from model_runtime.errors import CorruptObjectError

Kept = dict[str, list[bytes]]


def files_in(folder: Path) -> JournalFiles:
    return JournalFiles(folder, run_id="run", epoch=1)


def read(folder: Path) -> Kept:
    files = files_in(folder)
    try:
        return files.open()
    finally:
        files.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "1.journal"


@pytest.fixture
def files(folder: Path) -> Iterator[JournalFiles]:
    opened = files_in(folder)
    opened.open()
    yield opened
    opened.close()


def test_wherever_the_last_write_was_cut_off_the_earlier_ones_are_there_and_it_is_not(
    files: JournalFiles, folder: Path, tmp_path: Path
) -> None:
    files.append([("a", b"1"), ("b", b"2")])
    before = (folder / "00000001").stat().st_size
    files.append([("a", b"3"), ("b", None), ("c", b"4" * 30)])
    whole = (folder / "00000001").read_bytes()
    for length in range(len(whole) + 1):
        cut = tmp_path / f"cut-{length}"
        cut.mkdir()
        (cut / "00000001").write_bytes(whole[:length])
        found = read(cut)
        if length < len(whole):
            assert found == ({"a": [b"1"], "b": [b"2"]} if length >= before else {})
        else:
            assert found == {"a": [b"1", b"3"], "c": [b"4" * 30]}
        files_again = files_in(cut)
        files_again.open()
        files_again.append([("d", b"5")])
        files_again.close()
        assert read(cut) == found | {"d": [b"5"]}


def test_damage_anywhere_else_is_an_error(files: JournalFiles, folder: Path) -> None:
    for n in range(3):
        files.append([("a", bytes([n] * 10))])
    files.close()
    whole = (folder / "00000001").read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (folder / "00000001").write_bytes(damaged)
        with pytest.raises(CorruptObjectError, match="00000001 is"):
            read(folder)
        for later in folder.glob("0000000[2-9]"):
            later.unlink()


def test_a_file_that_breaks_off_before_others_is_an_error(
    files: JournalFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 50)
    for n in range(4):
        files.append([("a", bytes([n] * 60))])
        files.tidy()
    files.close()
    first = folder / "00000001"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CorruptObjectError, match="breaks off"):
        read(folder)


def test_a_process_may_die_between_any_two_steps_of_tidying(
    files: JournalFiles, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 400)
    wanted: Kept = {}
    states: list[tuple[Path, Kept]] = []

    def keep_state() -> None:
        states.append((tmp_path / f"state-{len(states)}", {k: list(v) for k, v in wanted.items()}))
        shutil.copytree(folder, states[-1][0])

    unlink = Path.unlink

    def noting(path: Path, missing_ok: bool = False) -> None:
        keep_state()  # what was wanted of it is there twice now
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noting)
    for n in range(120):
        owner, gone = f"s{n % 7}", f"s{(3 * n) % 7}"
        files.append([(gone, None), (owner, b"%d" % n * 20), ("always", b"%d" % n)])
        wanted.pop(gone, None)
        wanted.setdefault(owner, []).append(b"%d" % n * 20)
        wanted.setdefault("always", []).append(b"%d" % n)
        if files.is_untidy:
            files.tidy()
            keep_state()
    monkeypatch.undo()
    assert len(states) > 20
    assert "00000001" not in os.listdir(folder)
    for state, expected in states:
        assert read(state) == expected


def test_tidying_comes_to_an_end_however_small_the_rows_are(
    files: JournalFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 200)
    for n in range(300):
        files.append([("", b"")] if n % 2 else [("", b""), ("x", None)])
        for _ in range(100):
            if not files.is_untidy:
                break
            files.tidy()
        assert not files.is_untidy
    assert read_after_close(files, folder) == {"": [b""] * 300}


def read_after_close(files: JournalFiles, folder: Path) -> Kept:
    files.close()
    return read(folder)


def test_a_write_that_fails_half_way_leaves_nothing_of_it(
    files: JournalFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.append([("a", b"1")])
    write = os.pwrite

    def half(descriptor: int, data: bytes, place: int) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:-10], place)

    monkeypatch.setattr(os, "pwrite", half)
    with pytest.raises(OSError, match="No space"):
        files.append([("a", b"2" * 100), ("b", b"3")])
    monkeypatch.undo()
    files.append([("b", b"4")])
    assert read_after_close(files, folder) == {"a": [b"1"], "b": [b"4"]}


def test_a_file_that_could_not_be_begun_is_not_there_and_the_one_before_may_break_off(
    files: JournalFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 50)
    files.append([("a", b"1" * 60)])
    write = os.pwrite

    def full(descriptor: int, data: bytes, place: int) -> int:
        if place:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:5], place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        files.tidy()
    monkeypatch.setattr(os, "pwrite", write)
    assert os.listdir(folder) == ["00000001"]
    files.append([("a", b"2")])
    before = (folder / "00000001").stat().st_size
    files.append([("a", b"3")])
    files.close()
    os.truncate(folder / "00000001", before + 5)  # as a kill leaves it
    assert read(folder) == {"a": [b"1" * 60, b"2"]}
