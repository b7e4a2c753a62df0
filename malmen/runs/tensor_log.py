"""Tensors by name on disk, shared by processes: each writer appends to files of its own, each reader reads all files.

A folder holds pairs of files: `NAME.bin` with the bytes of tensors one after the other, and `NAME.jsonl` with a line
for each: its name, type, shape, offset and checksum. Lines are written after the bytes, so a process that is killed
leaves at worst bytes without a line, or half a line, which readers skip.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from malmen.errors import EditError


@dataclass(frozen=True)
class _Entry:
    """The location and type of one tensor."""

    file: Path
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class TensorLog:
    """The tensors that all processes have written to a folder; a stored tensor never changes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.used_bytes = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EditError(f"cannot create the cache folder {folder}: {error.strerror}") from error
        self._entries: dict[str, _Entry] = {}
        self._read: dict[Path, int] = {}  # bytes of each index that were read
        self._maps: dict[Path, mmap.mmap] = {}
        self._data: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.refresh()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def refresh(self) -> None:
        """Read the index lines that other processes have written since the last call."""
        for index in sorted(self.folder.glob("*.jsonl")):
            begin = self._read.get(index, 0)
            if index.stem == self._name or index.stat().st_size == begin:
                continue
            with index.open("rb") as file:
                file.seek(begin)
                text = file.read()
            complete = text[: text.rfind(b"\n") + 1]  # another process may be writing the rest
            self._read[index] = begin + len(complete)
            for line in complete.splitlines():
                self._index_line(index.with_suffix(".bin"), line)

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Store these for all processes; a name that exists keeps its tensor."""
        try:
            if self._data is None or self._index is None:
                self._data = (self.folder / f"{self._name}.bin").open("ab")
                self._index = (self.folder / f"{self._name}.jsonl").open("ab")
            new = {name: tensor for name, tensor in tensors.items() if name not in self}
            lines = [_append(self._data, name, tensor) for name, tensor in new.items()]
            self._data.flush()
            for line in lines:
                self._index.write(line + b"\n")
                self._index_line(self.folder / f"{self._name}.bin", line)
            self._index.flush()
        except OSError as error:
            raise EditError(f"cannot write to the cache {self.folder}: {error.strerror}") from error

    def get(self, name: str) -> Tensor:
        """The tensor of this name, which must exist."""
        entry = self._entries[name]
        mapped = self._maps.get(entry.file)
        if mapped is None or len(mapped) < entry.offset + entry.size:
            with entry.file.open("rb") as file:
                mapped = self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        content = bytearray(mapped[entry.offset : entry.offset + entry.size])
        if zlib.crc32(content) != entry.checksum:
            raise EditError(f"the cache file {entry.file} is damaged: delete {self.folder}, a run recreates it")
        dtype = getattr(torch, entry.dtype)
        if not content:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).reshape(entry.shape)

    def _index_line(self, file: Path, line: bytes) -> None:
        fields = json.loads(line)
        name = fields.pop("name")
        if name not in self._entries:
            self._entries[name] = _Entry(file, **{**fields, "shape": tuple(fields["shape"])})
            self.used_bytes += fields["size"]


def _append(data: BinaryIO, name: str, tensor: Tensor) -> bytes:
    """Write a tensor's bytes; returns its line of the index."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    offset = data.tell()
    data.write(content)
    line = {
        "name": name,
        "offset": offset,
        "size": len(content),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "checksum": zlib.crc32(content),
    }
    return json.dumps(line).encode()
