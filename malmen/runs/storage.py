"""The folder of a run, on a disk or on any storage that fsspec reaches: s3://, gs://, memory://, …

A checkpoint is complete once it holds state.json. On a disk it is renamed into place; elsewhere, where a rename is
not atomic, state.json is uploaded last and removed first. Only one process writes to a run.
"""

from __future__ import annotations

import errno
import re
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from malmen.errors import EditError
from malmen.runs.files import atomic_file, atomic_folder, remove_folder

STATE_FILE = "state.json"
CHECKPOINT_PREFIX = "checkpoint-"
_SPARE = ".new"
_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}(\d{{7,}})(?:{re.escape(_SPARE)})?")
_EXPECTED = "expected a folder in which files may be written, listed and removed"

# Errors of the packages behind fsspec that are no OSError, by the module that defines them.
_PACKAGE_ERRORS = {
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "google.auth.exceptions": ("GoogleAuthError",),
    "gcsfs.retry": ("HttpError",),
    "azure.core.exceptions": ("AzureError",),
    "aiohttp": ("ClientError",),
    "paramiko": ("SSHException",),
}


class RunStore:
    """A run's folder. Names are relative to it; "" is the folder itself."""

    def __init__(self, location: str | Path) -> None:
        protocol, is_url, path = str(location).partition("://")
        self.location: str | Path
        if not is_url:
            self.location = Path(location)
            # pathlib reads s3://bucket as a folder `s3:` and would write there.
            if re.match(r"[a-z][a-z0-9+]+:(/|$)", self.location.as_posix()):
                raise EditError(
                    f"{location} is a URL that went through pathlib.Path and lost a slash; give it as a string"
                )
        elif protocol in ("file", "local"):
            self.location = Path(path)
        else:
            self.location = f"{protocol}://{path.rstrip('/')}"

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's disk."""
        return isinstance(self.location, Path)

    def join(self, *names: str) -> str | Path:
        """The location of a file or folder in it: a Path on a disk, else a URL."""
        if isinstance(self.location, Path):
            return self.location.joinpath(*names)
        return "/".join((self.location, *(name for name in names if name)))

    def exists(self, name: str) -> bool:
        """Whether this file or folder exists."""
        if self.is_local:
            return self._local(name).exists()
        return bool(self._call(self._fresh().exists, self._remote(name)))

    def read_text(self, name: str) -> str:
        """The content of a UTF-8 file."""
        if self.is_local:
            return self._local(name).read_text(encoding="utf-8")
        return str(self._call(self._fs.cat_file, self._remote(name)), encoding="utf-8")

    def write_text(self, name: str, text: str) -> None:
        """Write a UTF-8 file, complete or not at all."""
        if self.is_local:
            self._local(name).parent.mkdir(parents=True, exist_ok=True)
            atomic_file(self._local(name), text)
            return
        with tempfile.TemporaryDirectory(prefix="malmen-") as scratch:
            file = Path(scratch) / "text"
            file.write_text(text, encoding="utf-8")
            self._call(self._fs.put_file, str(file), self._remote(name))

    def checkpoints(self) -> list[str]:
        """The names of the complete checkpoints, the newest last."""
        matches = [match for name in self._names() if (match := _CHECKPOINT.fullmatch(name))]
        matches.sort(key=lambda match: (int(match[1]), match[0]))
        return [match[0] for match in matches if self.exists(f"{match[0]}/{STATE_FILE}")]

    @contextmanager
    def publish(self, name: str) -> Iterator[Path]:
        """A local scratch folder that becomes `name` when the block succeeds."""
        if self.is_local:
            with atomic_folder(self._local(name), replaces=STATE_FILE) as fresh:
                yield fresh
            return
        with tempfile.TemporaryDirectory(prefix="malmen-") as scratch:
            complete = Path(scratch) / "complete"
            with atomic_folder(complete, replaces=STATE_FILE) as fresh:
                yield fresh
            spare = name + _SPARE
            if self.exists(f"{name}/{STATE_FILE}"):  # the old one is removed only when the new one is safe
                self._upload(complete, spare)
            self.remove(name)
            self._upload(complete, name)
            self.remove(spare)

    def remove(self, name: str) -> None:
        """Remove a folder, if it exists; a partly removed one never counts as complete."""
        if self.is_local:
            if self._local(name).exists():
                remove_folder(self._local(name))
            return
        for file in sorted(self._files(name), key=lambda file: PurePath(file).name != STATE_FILE):
            self._call(self._fs.rm_file, file)
        with suppress(OSError):  # only a storage with real folders keeps an empty one
            self._call(self._fs.rmdir, self._remote(name))

    @contextmanager
    def fetch(self, name: str = "", *, without: Collection[str] = ()) -> Iterator[Path]:
        """The folder on this disk: itself, or a copy without the files `without` that exists during the block."""
        if self.is_local:
            yield self._local(name)
            return
        with tempfile.TemporaryDirectory(prefix="malmen-") as scratch:
            for file in self._files(name):
                relative = PurePath(file).relative_to(self._remote(name))
                if relative.as_posix() not in without:
                    target = Path(scratch) / relative
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._call(self._fs.get_file, file, str(target))
            yield Path(scratch)

    def check_writable(self) -> None:
        """Write and remove a probe, so that a run fails before its work and not after it; leaves no file or folder."""
        probe, missing = f".probe-{uuid.uuid4().hex}", list[Path]()
        try:
            if self.is_local:
                missing += [folder for folder in self._local(probe).parents if not folder.exists()]
                self.write_text(probe, "probe")
                self._local(probe).unlink()
            elif self._call(self._fresh().isfile, self._root):
                raise FileExistsError(self._root)
            else:
                self.write_text(probe, "probe")
                self._call(self._fs.rm_file, self._remote(probe))
        except (FileExistsError, NotADirectoryError) as error:
            raise EditError(f"cannot write to {self.location}: it is a file, or lies below one; {_EXPECTED}") from error
        except OSError as error:
            raise EditError(f"cannot write to {self.location}: {error.strerror or error}; {_EXPECTED}") from error
        finally:
            for folder in missing:  # the deepest first
                with suppress(OSError):
                    folder.rmdir()

    def _local(self, name: str) -> Path:
        return Path(self.location) / name

    def _remote(self, *names: str) -> str:
        return "/".join((self._root, *(name for name in names if name)))

    def _names(self) -> list[str]:
        """The names of the entries of the folder."""
        if self.is_local:
            return [path.name for path in self._local("").iterdir()] if self._local("").is_dir() else []
        with suppress(FileNotFoundError):
            return [PurePath(path).name for path in self._call(self._fresh().ls, self._root, False)]
        return []

    def _files(self, name: str) -> list[str]:
        return list(self._call(self._fresh().find, self._remote(name)))

    def _upload(self, folder: Path, name: str) -> None:
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda file: file == STATE_FILE):
            self._call(self._fs.put_file, str(folder / file), self._remote(name, file))

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the storage; errors of its package become OSError."""
        try:
            return call(*arguments)
        except _package_errors() as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise OSError(errno.EIO, reason, str(self.location)) from error

    def _fresh(self) -> Any:
        """The storage without cached listings: another process may have written since."""
        self._fs.invalidate_cache()
        return self._fs

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    @property
    def _root(self) -> str:
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # slow to import, and local runs do not need it

        try:
            fs, root = self._call(url_to_fs, self.location)
        except ImportError as error:
            raise EditError(
                f"cannot open {self.location}: its protocol needs a package that is not installed: "
                f"{error} ({error.__cause__})"
            ) from error
        except (OSError, ValueError) as error:
            raise EditError(
                f"cannot open {self.location}: {error}; expected a local folder, or a URL of a storage that fsspec "
                "can open, such as s3://bucket/run"
            ) from error
        return fs, root.rstrip("/")


def _package_errors() -> tuple[type[Exception], ...]:
    loaded = [(sys.modules[module], names) for module, names in _PACKAGE_ERRORS.items() if module in sys.modules]
    return tuple(getattr(module, name) for module, names in loaded for name in names)
