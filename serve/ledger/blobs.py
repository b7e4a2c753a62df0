"""Tensors on disk under the hash of their content: written once, never changed, checked when read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from malmen.errors import EditError


class BlobStore:
    """A folder of safetensors files. On a cluster it is a shared one: every role reads it, the writer writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, tensors: Mapping[str, Tensor]) -> str:
        """Store tensors; on return they are on the disk, whole. The name is the SHA-256 of the file."""
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        name = hashlib.sha256(data).hexdigest()
        target = self.path(name)
        if target.exists():
            return name
        descriptor, scratch = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, target)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        self._sync_folder()
        return name

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name; a file that is gone or was changed is an error, never a wrong answer."""
        try:
            data = self.path(name).read_bytes()
        except OSError as error:
            raise EditError(f"cannot read the stored tensors {self.path(name)}: {error.strerror}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != name:
            raise EditError(f"{self.path(name)} was changed: its content has hash {found[:16]}…, not its name")
        try:
            return load(data)
        except SafetensorError as error:
            raise EditError(f"{self.path(name)} is no safetensors file: {error}") from error

    def path(self, name: str) -> Path:
        """Where a blob lies."""
        assert len(name) == 64 and set(name) <= set("0123456789abcdef"), name
        return self.folder / f"{name}.safetensors"

    def _sync_folder(self) -> None:
        """A rename is on the disk when its folder is."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def as_stored(shifts: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Shifts as a version keeps them: in float32, or as exact as the LM where that is more."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    return {name: shift.to(kept) for name, shift in shifts.items()}
