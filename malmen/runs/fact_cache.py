"""A cache of what the frozen LM computes for a fact. It does not depend on θ, so later epochs and other runs use it."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from malmen.data.tokens import EncodedFact
from malmen.errors import EditError

Numbered = list[tuple[int, EncodedFact]]  # facts with their indices


class FactCache:
    """Tensors by content of a fact, within a budget of bytes; in memory, or in a folder that other runs share.

    A full cache stores nothing more and evicts nothing: every epoch passes all facts in a new order, so each entry is
    used once an epoch, and exchanging entries would gain nothing.
    """

    def __init__(self, budget_bytes: int, folder: Path | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.hits = 0
        self._tensors: TensorLog | _Memory = _Memory() if folder is None else TensorLog(folder)

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget that are used."""
        return self._tensors.used_bytes

    def split(self, kinds: Sequence[str], facts: Iterable[EncodedFact]) -> tuple[Numbered, Numbered]:
        """The facts with their indices: those of which every kind of tensor is cached, and the others."""
        self._tensors.refresh()
        known: Numbered = []
        fresh: Numbered = []
        for index, fact in enumerate(facts):
            (known if self.holds(kinds, fact) else fresh).append((index, fact))
        self.hits += len(known)
        return known, fresh

    def holds(self, kinds: Sequence[str], fact: EncodedFact) -> bool:
        """Whether every kind of tensor is cached."""
        digest = _digest(fact)
        return bool(kinds) and all(f"{kind}/{digest}" in self._tensors for kind in kinds)

    def get(self, kind: str, fact: EncodedFact) -> Tensor:
        """A tensor that the cache holds."""
        return self._tensors[f"{kind}/{_digest(fact)}"]

    def put(self, fact: EncodedFact, tensors: dict[str, Tensor]) -> None:
        """Store these tensors by kind, if there is room for all of them."""
        digest = _digest(fact)
        named = {f"{kind}/{digest}": tensor for kind, tensor in tensors.items()}
        new = {name: tensor for name, tensor in named.items() if name not in self._tensors}
        if self.used_bytes + sum(tensor.nbytes for tensor in new.values()) <= self.budget_bytes:
            self._tensors.put(new)


def _digest(fact: EncodedFact) -> str:
    content = repr((fact.input_ids, fact.first, fact.targets, fact.encoder_ids)).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _Memory(dict[str, Tensor]):
    """Tensors by name in this process, with the interface of TensorLog."""

    used_bytes = 0

    def refresh(self) -> None:
        """No other process writes here."""

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self[name] = tensor.detach().clone()  # a view would keep its batch alive
            self.used_bytes += tensor.nbytes


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
    """The tensors that all processes have written to a folder; a stored tensor never changes.

    Each writer appends to files of its own, each reader reads all files: pairs of `NAME.bin` with the bytes of tensors
    one after the other, and `NAME.jsonl` with a line for each: its name, type, shape, offset and checksum. Lines are
    written after the bytes, so a process that is killed leaves at worst bytes without a line, or half a line, which
    readers skip.
    """

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

    def __getitem__(self, name: str) -> Tensor:
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
