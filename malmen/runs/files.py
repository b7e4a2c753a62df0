"""Files and folders that are there whole or not at all: written under a temporary name, then renamed.

What was renamed is on the disk itself, so that a power loss cannot leave empty files under the right names.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from malmen.errors import EditError, UsageError


@contextmanager
def exclusive_folder(place: str | Path) -> Iterator[None]:
    """One command at a time on this machine writes to a folder; UsageError for the second. Its death ends its claim."""
    if "://" in str(place):  # another machine may be at work there: nothing here can tell
        yield
        return
    name = hashlib.sha256(os.fsencode(os.path.realpath(place))).hexdigest()[:32]
    claims = Path(tempfile.gettempdir()) / f"malmen-at-work-{os.getuid()}"
    claims.mkdir(exist_ok=True)
    claim = FileLock(claims / name, timeout=0)
    try:
        claim.acquire()
    except Timeout as error:
        raise UsageError(f"another command is at work in {place}: wait for it, or choose another --out") from error
    try:
        yield
    finally:
        claim.release()


def atomic_file(path: Path, text: str) -> None:
    """Write a text file in one go."""
    fresh = path.with_name(f".writing-{path.name}")
    try:
        fresh.write_text(text, encoding="utf-8")
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def check_replaceable(target: Path, replaces: str) -> None:
    """An existing folder may be replaced only if it holds the file that marks it as one of ours."""
    if target.exists() and not (target / replaces).exists() and (not target.is_dir() or any(target.iterdir())):
        raise EditError(f"{target} exists and holds no {replaces}: it is not replaced; choose another place")


@contextmanager
def atomic_folder(target: Path, replaces: str) -> Iterator[Path]:
    """A scratch folder that becomes `target` when the block ends well."""
    check_replaceable(target, replaces)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".writing-") as scratch:
        fresh = Path(scratch) / target.name
        fresh.mkdir()
        try:
            yield fresh
        except SafetensorError as error:
            raise OSError(f"cannot write {target}: {error}") from error
        for path in (*fresh.rglob("*"), fresh):
            sync(path)
        if target.exists():
            # Renamed away, not deleted: until the new one stands in its place nothing is lost.
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
        sync(target.parent)


def sync(path: Path) -> None:
    """A file's content, or a folder's names, onto the disk; a network file system may not know how for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def remove_folder(target: Path) -> None:
    """Gone at once: renamed away before anything in it is deleted."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".removing-") as scratch:
        target.rename(Path(scratch) / target.name)
