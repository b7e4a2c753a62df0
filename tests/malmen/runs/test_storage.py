"""A run's folder on a disk and elsewhere: the same laws, and no half-written folder taken for a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from full_disk import full_disk

from malmen.errors import EditError
from malmen.runs.storage import RunStore

FILES = ("config.json", "data.bin", "state.json")
CHANGES = ("put_file", "rm_file", "rmdir")  # what RunStore calls to change a storage


class Killed(BaseException):
    """Like a KeyboardInterrupt: nothing handles it."""


@pytest.fixture
def memory() -> Iterator[str]:
    """A run on a storage that is no disk."""
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["path", "text", "file", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path, memory: str) -> str | Path:
    """A run's folder that is not there yet, in every spelling."""
    folder = tmp_path / "deep" / "run"
    spelt: dict[str, str | Path] = {"path": folder, "text": str(folder), "file": f"file://{folder}", "memory": memory}
    return spelt[request.param]


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`kill(n)`: the storage makes n more changes, and dies in the middle of the next one."""

    def kill_after(left: int) -> None:
        def dying(change: Callable[..., Any]) -> Callable[..., Any]:
            def call(fs: MemoryFileSystem, *arguments: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Killed
                left -= 1
                return change(fs, *arguments)

            return call

        monkeypatch.undo()
        for name in CHANGES:
            monkeypatch.setattr(MemoryFileSystem, name, dying(getattr(MemoryFileSystem, name)))

    return kill_after


def _publish(store: RunStore, name: str, content: str) -> None:
    with store.publish(name) as folder:
        for file in FILES:
            (folder / file).write_text(content)


def _content(store: RunStore, name: str) -> list[str]:
    """What the files of a folder say; a whole one says one thing."""
    with store.fetch(name) as folder:
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        return sorted({path.read_text() for path in folder.iterdir()})


def test_a_text_is_written_read_and_replaced(location: str | Path) -> None:
    store = RunStore(location)
    assert not store.exists("notes/a.txt")
    for text in ("one\n", "zwölf\n", ""):
        store.write_text("notes/a.txt", text)
        assert store.exists("notes/a.txt")
        assert store.read_text("notes/a.txt") == text
    with pytest.raises(FileNotFoundError):
        store.read_text("notes/b.txt")


def test_published_folders_are_listed_by_step_fetched_and_removed(location: str | Path) -> None:
    store = RunStore(location)
    assert store.checkpoints() == []
    for step in ("0000020", "0000003", "12345678"):  # a step of eight digits is newer than one of seven
        _publish(store, f"checkpoint-{step}", step)
    store.write_text("checkpoint-final/state.json", "not of ours")
    assert store.checkpoints() == ["checkpoint-0000003", "checkpoint-0000020", "checkpoint-12345678"]
    assert _content(store, "checkpoint-0000020") == ["0000020"]
    store.remove("checkpoint-0000003")
    store.remove("checkpoint-0000003")  # nothing left to remove
    assert not store.exists("checkpoint-0000003")
    assert store.checkpoints() == ["checkpoint-0000020", "checkpoint-12345678"]
    assert store.exists("checkpoint-final/state.json")


def test_a_folder_is_replaced_whole_and_leaves_nothing_beside_it(location: str | Path) -> None:
    store = RunStore(location)
    for content in ("old", "new"):
        _publish(store, "checkpoint-0000001", content)
    assert store.checkpoints() == ["checkpoint-0000001"]
    assert _content(store, "checkpoint-0000001") == ["new"]
    fs, root = fsspec.url_to_fs(str(location))
    assert [Path(path).name for path in fs.ls(root, detail=False)] == ["checkpoint-0000001"]


def test_an_exception_in_the_block_publishes_nothing(location: str | Path) -> None:
    store = RunStore(location)
    with pytest.raises(Killed), store.publish("checkpoint-0000001") as folder:
        (folder / "state.json").write_text("half")
        raise Killed
    assert not store.exists("checkpoint-0000001")


def test_on_a_disk_a_place_is_a_path_and_elsewhere_a_url(tmp_path: Path, memory: str) -> None:
    for spelling in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        store = RunStore(spelling)
        assert store.is_local
        assert store.join("a", "b") == tmp_path / "a" / "b"
    store = RunStore(memory + "/")
    assert not store.is_local
    assert (store.join("a", "b"), store.join()) == (f"{memory}/a/b", memory)


def test_fetching_copies_only_what_is_not_on_this_disk(tmp_path: Path, memory: str) -> None:
    _publish(RunStore(tmp_path), "checkpoint-0000001", "")
    with RunStore(tmp_path).fetch("checkpoint-0000001") as folder:
        assert folder == tmp_path / "checkpoint-0000001"
    _publish(RunStore(memory), "checkpoint-0000001", "")
    with RunStore(f"{memory}/checkpoint-0000001").fetch(without=["data.bin"]) as folder:
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "state.json"]
    assert not folder.exists()


# --- killed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", range(3))
def test_a_killed_upload_is_ignored_and_overwritten(memory: str, kill: Callable[[int], None], changes: int) -> None:
    store = RunStore(memory)
    _publish(store, "checkpoint-0000001", "one")
    kill(1 + changes)  # the first is the removal of an earlier leftover's folder
    with pytest.raises(Killed):
        _publish(store, "checkpoint-0000002", "half")
    assert len(store._files("checkpoint-0000002")) == changes
    assert store.checkpoints() == ["checkpoint-0000001"]
    kill(1000)
    _publish(store, "checkpoint-0000002", "two")
    assert store.checkpoints() == ["checkpoint-0000001", "checkpoint-0000002"]
    assert _content(store, "checkpoint-0000002") == ["two"]


@pytest.mark.parametrize("changes", range(14))
def test_whenever_a_replacement_is_killed_the_old_or_the_new_one_is_there_whole(
    memory: str, kill: Callable[[int], None], changes: int
) -> None:
    store = RunStore(memory)
    _publish(store, "checkpoint-0000001", "old")
    kill(changes)
    with pytest.raises(Killed):  # three uploads beside it, four removals, three uploads, four removals
        _publish(store, "checkpoint-0000001", "new")
    kill(1000)
    assert store.checkpoints()
    for name in store.checkpoints():
        assert _content(store, name) in (["old"], ["new"])
    _publish(store, "checkpoint-0000001", "again")
    assert store.checkpoints() == ["checkpoint-0000001"]
    assert _content(store, "checkpoint-0000001") == ["again"]


@pytest.mark.parametrize("changes", range(4))
def test_a_folder_whose_removal_was_killed_is_whole_or_not_listed(
    memory: str, kill: Callable[[int], None], changes: int
) -> None:
    store = RunStore(memory)
    _publish(store, "checkpoint-0000001", "one")
    kill(changes)
    with pytest.raises(Killed):
        store.remove("checkpoint-0000001")
    assert store.checkpoints() == ([] if changes else ["checkpoint-0000001"])


def test_a_full_scratch_disk_is_an_os_error_and_uploads_nothing(memory: str) -> None:
    store = RunStore(memory)
    with full_disk(left=100), pytest.raises(OSError):
        _publish(store, "checkpoint-0000001", "x" * 1000)
    assert not store.exists("checkpoint-0000001")


# --- refused -----------------------------------------------------------------------------------------


def test_a_writable_place_passes_and_is_left_as_it_was(location: str | Path, tmp_path: Path) -> None:
    store = RunStore(location)
    store.check_writable()
    assert store._names() == []
    assert list(tmp_path.iterdir()) == []
    store.write_text("notes.txt", "mine")
    store.check_writable()
    assert store._names() == ["notes.txt"]


@pytest.mark.parametrize("below", ["", "/run", "/deep/run"])
def test_a_file_is_no_place_for_a_run_nor_is_anything_below_it(tmp_path: Path, memory: str, below: str) -> None:
    (tmp_path / "file").write_text("dear")
    MemoryFileSystem().pipe_file("/bucket/file", b"dear")
    for place in (f"{tmp_path}/file{below}", f"memory://bucket/file{below}"):
        with pytest.raises(EditError, match=f"cannot write to {place}: it is a file, or lies below one; expected a"):
            RunStore(place).check_writable()
    assert (tmp_path / "file").read_text() == "dear"


def test_a_folder_that_the_system_will_not_make_is_refused() -> None:
    with pytest.raises(EditError, match=r"cannot write to /proc/malmen/run: .*; expected a folder in which"):
        RunStore("/proc/malmen/run").check_writable()


@pytest.mark.parametrize("change", ["put_file", "rm_file"])
@pytest.mark.parametrize("error", [PermissionError("Access Denied"), aiohttp.ClientError("Access Denied")])
def test_a_storage_that_denies_writing_or_removing_is_one_message(
    memory: str, monkeypatch: pytest.MonkeyPatch, change: str, error: Exception
) -> None:
    def deny(*_: object) -> None:
        raise error

    monkeypatch.setattr(MemoryFileSystem, change, deny)
    with pytest.raises(EditError, match=rf"cannot write to {memory}: .*Access Denied; expected a folder in which"):
        RunStore(memory).check_writable()


def test_a_protocol_without_its_package_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"class": "nowherefs.NowhereFileSystem", "err": "Install nowherefs to access Nowhere"}
    monkeypatch.setitem(known_implementations, "nowhere", missing)
    with pytest.raises(EditError, match=r"nowhere://bucket/run: .* not installed: Install nowherefs"):
        RunStore("nowhere://bucket/run").check_writable()


def test_an_unknown_protocol_says_what_was_expected() -> None:
    with pytest.raises(EditError, match=r"s4://bucket/run: Protocol not known: s4; expected a local folder, or a URL"):
        RunStore("s4://bucket/run").check_writable()


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", "memory://"])
def test_a_url_that_lost_a_slash_as_a_path_is_not_taken_for_a_folder(url: str) -> None:
    with pytest.raises(EditError, match="lost a slash; give it as a string"):
        RunStore(Path(url))
