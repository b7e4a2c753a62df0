"""Tensors under the hash of their content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from malmen.errors import EditError
from malmen.serve.ledger.blobs import BlobStore


def test_what_was_put_comes_back_and_twice_the_same_is_one_file(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    name = store.put(tensors)
    assert store.put(tensors) == name and len(list(tmp_path.iterdir())) == 1
    assert all(torch.equal(value, tensors[key]) for key, value in store.get(name).items())


def test_a_file_that_was_changed_or_is_gone_is_an_error(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    name = store.put({"a": torch.zeros(8)})
    data = bytearray(store.path(name).read_bytes())
    data[-1] ^= 1
    store.path(name).write_bytes(bytes(data))
    with pytest.raises(EditError, match="was changed"):
        store.get(name)
    store.path(name).unlink()
    with pytest.raises(EditError, match="cannot read"):
        store.get(name)
