from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import save_file

from malmen.errors import EditError, UsageError
from malmen.runs.files import atomic_file, atomic_folder, check_replaceable, exclusive_folder, remove_folder


def _content(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """One of our folders."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mark.json").write_text("{}")
    (folder / "data").write_text("old")
    return folder


def test_a_folder_is_replaced_whole(target: Path) -> None:
    with atomic_folder(target, replaces="mark.json") as fresh:
        (fresh / "mark.json").write_text("new")
        assert (target / "data").read_text() == "old"  # until the block ends
    assert _content(target.parent) == {"folder": None, "folder/mark.json": b"new"}


def test_a_folder_is_made_with_its_parents_where_there_is_none_or_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "deep" / "er", tmp_path / "empty"):
        with atomic_folder(folder, replaces="mark.json") as fresh:
            (fresh / "mark.json").write_text("{}")
        assert _content(folder) == {"mark.json": b"{}"}
        assert [path.name for path in folder.parent.glob(".*")] == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_folder_and_nothing_else(target: Path, error: type[BaseException]) -> None:
    before = _content(target.parent)
    with pytest.raises(error), atomic_folder(target, replaces="mark.json") as fresh:
        (fresh / "mark.json").write_text("half")
        raise error
    assert _content(target.parent) == before


def test_an_exception_where_there_was_no_folder_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "folder", replaces="mark.json"):
        raise ZeroDivisionError
    assert _content(tmp_path) == {}


def test_what_is_not_ours_is_refused_and_untouched(tmp_path: Path) -> None:
    foreign = tmp_path / "thesis"
    (foreign / "chapters").mkdir(parents=True)
    (foreign / "chapters" / "one.txt").write_text("years of work")
    file = tmp_path / "letter"
    file.write_text("dear")
    before = _content(tmp_path)
    for place in (foreign, file):
        with pytest.raises(EditError, match=r"holds no mark\.json: it is not replaced"):
            check_replaceable(place, "mark.json")
        with pytest.raises(EditError, match="not replaced"), atomic_folder(place, replaces="mark.json"):
            pytest.fail("the block must not be entered")
    assert _content(tmp_path) == before


def test_ours_an_empty_one_and_none_at_all_may_be_replaced(target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (target, tmp_path / "empty", tmp_path / "none"):
        check_replaceable(place, "mark.json")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for text in ("one\n", "zwölf\n"):
        atomic_file(tmp_path / "file", text)
        assert _content(tmp_path) == {"file": text.encode()}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """What is done to the disk, in order: the inode that was brought onto it, or `renamed`."""
    found: list[int | str] = []
    fsync = os.fsync

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        found.append(os.fstat(descriptor).st_ino)

    def noted(rename: Callable[..., None]) -> Callable[..., None]:
        def note_rename(*paths: object) -> None:
            rename(*paths)
            found.append("renamed")

        return note_rename

    monkeypatch.setattr("os.fsync", note_sync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(f"os.{name}", noted(getattr(os, name)))
    return found


def test_a_folder_is_on_the_disk_before_it_takes_its_place_and_its_name_after(
    target: Path, done: list[int | str]
) -> None:
    with atomic_folder(target, replaces="mark.json") as fresh:
        (fresh / "mark.json").write_text("new")
        (fresh / "deep").mkdir()
        (fresh / "deep" / "data").write_text("new")
    first = done.index("renamed")
    assert {path.stat().st_ino for path in (target, *target.rglob("*"))} == set(done[:first])
    assert done[first:] == ["renamed", "renamed", target.parent.stat().st_ino]


def test_a_file_is_on_the_disk_before_it_takes_its_place_and_its_name_after(
    tmp_path: Path, done: list[int | str]
) -> None:
    atomic_file(tmp_path / "file", "text")
    assert done == [(tmp_path / "file").stat().st_ino, "renamed", tmp_path.stat().st_ino]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_where_folders_cannot_be_brought_onto_the_disk_their_files_still_are(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network file systems have it; of a file it would be an error."""

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (what == "folder"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.fsync", refuse)
    with nullcontext() if what == "folder" else pytest.raises(OSError, match="Invalid argument"):
        atomic_file(tmp_path / "file", "text")
    assert _content(tmp_path) == ({"file": b"text"} if what == "folder" else {})


def test_a_text_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    atomic_file(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_file(tmp_path / "file", "new \ud800")
    with full_disk(left=100), pytest.raises(OSError):
        atomic_file(tmp_path / "file", "new" * 100)
    assert _content(tmp_path) == {"file": b"old"}


def test_a_full_disk_is_an_os_error_that_names_the_folder_and_leaves_the_old_one(target: Path) -> None:
    before = _content(target.parent)
    with (
        full_disk(left=1000),
        pytest.raises(OSError, match=f"cannot write {target}"),
        atomic_folder(target, replaces="mark.json") as fresh,
    ):
        save_file({"a": torch.zeros(1000)}, fresh / "a.safetensors")
    assert _content(target.parent) == before


def test_a_folder_is_removed_with_all_that_is_in_it(target: Path) -> None:
    (target / "deep").mkdir()
    (target / "deep" / "file").write_text("")
    remove_folder(target)
    assert _content(target.parent) == {}


def test_a_removal_that_breaks_off_leaves_no_part_of_the_folder_in_its_place(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.unlink", break_off)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(target)
    monkeypatch.undo()
    assert not target.exists()


_HOLD = """
import sys
from malmen.runs.files import exclusive_folder
with exclusive_folder(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_command_is_told_that_one_is_at_work_until_that_one_ends_or_is_killed(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=r"another command is writing to .*run: wait for it"),
            exclusive_folder(place),
        ):
            pass
        with exclusive_folder(tmp_path / "elsewhere"):
            pass
        other.kill()
    with exclusive_folder(place):
        pass
    assert not place.exists()  # nothing of it lies in the folder


def test_an_error_inside_ends_the_claim(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), exclusive_folder(tmp_path):
        raise ValueError("inside")
    with exclusive_folder(tmp_path):
        pass
