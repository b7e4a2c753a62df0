"""Files and folders that appear complete or not at all: written under a temporary name, then renamed.

The content is flushed to the disk before the rename, so a power loss cannot leave empty files under the right names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from malmen.errors import EditError, UsageError


@contextmanager
def exclusive_folder(place: str | Path) -> Iterator[None]:
    """A lock for one command at a time on this machine; UsageError for a second. It ends with its process."""
    if "://" in str(place):  # other machines may write there: no lock of this one helps
        yield
        return
    name = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:32]
    locks = Path(tempfile.gettempdir()) / f"malmen-at-work-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    try:
        lock = FileLock(locks / name, timeout=0).acquire()
    except Timeout as error:
        raise UsageError(f"another command is writing to {place}: wait for it, or choose another --out") from error
    with lock:
        yield


def atomic_file(path: Path, text: str) -> None:
    """Write a text file that readers see complete or not at all."""
    fresh = path.with_name(f".writing-{path.name}")
    try:
        fresh.write_text(text, encoding="utf-8")
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """The same for a JSON document."""
    atomic_file(path, json_text(value))


def json_text(value: Any) -> str:
    """A JSON document for people and programs."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def check_replaceable(target: Path, replaces: str) -> None:
    """EditError if `target` exists, is not empty, and lacks the file `replaces` that marks it as one of ours."""
    if target.exists() and not (target / replaces).exists() and (not target.is_dir() or any(target.iterdir())):
        raise EditError(f"{target} exists and holds no {replaces}: it is not replaced; choose another folder")


@contextmanager
def atomic_folder(target: Path, replaces: str) -> Iterator[Path]:
    """A scratch folder that becomes `target` when the block succeeds."""
    check_replaceable(target, replaces)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".writing-") as scratch:
        fresh = Path(scratch) / target.name
        fresh.mkdir()
        try:
            yield fresh
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))  # what the kernel said, e.g. 28: no space left
            raise OSError(int(number[1]) if number else errno.EIO, f"cannot write {target}: {error}") from error
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        if target.exists():
            # Renamed, not deleted: nothing is lost until the new one has its name.
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
        sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file's content or a folder's names to the disk; some network file systems cannot do that for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_folder(target: Path) -> None:
    """Remove a folder at once: it is renamed before anything in it is deleted."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".removing-") as scratch:
        target.rename(Path(scratch) / target.name)
