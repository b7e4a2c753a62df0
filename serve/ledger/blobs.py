"""Tensors on disk, named by the hash of their content: written once, never changed, checked when read."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from malmen.errors import EditError
from malmen.runs.files import sync


class BlobStore:
    """A folder of safetensors files; on a cluster a shared one, which all processes read and the writer writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, tensors: Mapping[str, Tensor]) -> str:
        """Store tensors and return their name, the SHA-256 of the file; on return they are on the disk."""
        data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        name = hashlib.sha256(data).hexdigest()
        target = self.path(name)
        if target.exists():
            return name
        scratch = self.folder / f".writing-{uuid.uuid4().hex}"
        try:
            scratch.write_bytes(data)
            sync(scratch)
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        sync(self.folder)
        return name

    def get(self, name: str) -> dict[str, Tensor]:
        """The tensors of a name; EditError where the file is missing or was changed."""
        try:
            data = self.path(name).read_bytes()
        except OSError as error:
            raise EditError(f"cannot read the stored tensors {self.path(name)}: {error.strerror}") from error
        content = hashlib.sha256(data).hexdigest()
        if content != name:
            raise EditError(f"{self.path(name)} was changed: its content has the hash {content[:16]}…")
        try:
            return load(data)
        except SafetensorError as error:
            raise EditError(f"{self.path(name)} is not a safetensors file: {error}") from error

    def path(self, name: str) -> Path:
        """The file of a blob."""
        assert len(name) == 64 and set(name) <= set("0123456789abcdef"), name
        return self.folder / f"{name}.safetensors"
