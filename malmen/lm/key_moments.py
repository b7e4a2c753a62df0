"""The second moment of a layer's keys, E[u uᵀ], over plain text: what MEMIT must not disturb.

Computed once, text by text, and kept in a file whose name is a hash of all it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.errors import EditError
from malmen.lm.layers import LayerSpec
from malmen.lm.model import LanguageModel
from malmen.lm.trace import rows_at

_TEXTS_AT_ONCE = 256


@dataclass(frozen=True)
class KeyMoments:
    """E[u uᵀ] by layer (key, key) in float64, and the seconds that it took whoever computed it."""

    by_layer: dict[str, Tensor]
    seconds: float


def read_texts(path: Path) -> Iterator[str]:
    """One text a line, read as far as they are asked for."""
    some = False
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    some = True
                    yield line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"cannot read the corpus {path}: {error}") from error
    if not some:
        raise EditError(f"the corpus {path} holds no text: expected one text a line")


def key_moments(
    lm: LanguageModel, layers: Sequence[LayerSpec], texts: Iterable[str], max_tokens: int, *,
    token_budget: int = 4096, cache: Path | None = None, on_tokens: Callable[[int], None] | None = None,
) -> KeyMoments:  # fmt: skip
    """Of the first `max_tokens` tokens of the texts; what comes after them is not read."""
    parts = list(_some_at_a_time(lm, texts, max_tokens))
    about = [lm.fingerprint(), [layer.name for layer in layers], [fact.input_ids for part in parts for fact in part]]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    kept = cache / f"{name}.safetensors" if cache is not None else None
    if kept is not None and kept.is_file():
        return _read(kept, lm)
    began, sums, count = time.perf_counter(), KeySums(lm, layers), 0
    for encoded in parts:
        for batch in make_batches(encoded, token_budget, lm.pad_id):
            sums.read(batch)
        count += sum(len(fact.input_ids) for fact in encoded)
        if on_tokens:
            on_tokens(count)
    found = KeyMoments(sums.moments(), time.perf_counter() - began)
    if kept is not None:
        _write(kept, found)
    return found


def _read(path: Path, lm: LanguageModel) -> KeyMoments:
    with safe_open(path, framework="pt") as file:
        seconds = float(file.metadata()["seconds"])
    return KeyMoments({key: found.to(lm.device) for key, found in load_file(path).items()}, seconds)


def _write(path: Path, found: KeyMoments) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {key: moment.cpu().contiguous() for key, moment in found.by_layer.items()}
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:  # several may compute the same at the same time
        save_file(tensors, Path(scratch) / path.name, metadata={"seconds": str(found.seconds)})
        os.replace(Path(scratch) / path.name, path)


def _some_at_a_time(lm: LanguageModel, texts: Iterable[str], max_tokens: int) -> Iterator[list[EncodedFact]]:
    """Texts as token lists, none longer than the model reads, until there are enough tokens."""
    longest, taken, left = lm.max_positions or 1024, 0, iter(texts)
    while some := list(islice(left, _TEXTS_AT_ONCE)):
        encoded = []
        for ids in lm.tokenizer(some)["input_ids"]:
            ids = ids[: min(longest, max_tokens - taken)]
            taken += len(ids)
            if ids:
                encoded.append(EncodedFact(ids, len(ids) - 1, [0]))
        if encoded:
            yield encoded
        if taken >= max_tokens:
            return


_AT_ONCE = 4 * 2**30  # bytes of sums; what goes beyond is read again


def layers_at_once(layers: Sequence[LayerSpec], limit: int = _AT_ONCE) -> list[list[LayerSpec]]:
    """Parts of the layers whose sums fit into so many bytes; each has one at least."""
    parts: list[list[LayerSpec]] = []
    for layer in layers:
        if parts and sums_bytes([*parts[-1], layer]) <= limit:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return parts


def sums_bytes(layers: Sequence[LayerSpec]) -> int:
    """What the sums of these layers take."""
    return sum(8 * layer.key_size**2 for layer in layers)


class KeySums:
    """Σ u uᵀ of each layer (key, key) in float64, and over how many tokens."""

    def __init__(self, lm: LanguageModel, layers: Sequence[LayerSpec]) -> None:
        self.lm, self.layers = lm, list(layers)
        like: dict[str, Any] = {"dtype": torch.float64, "device": lm.device}
        self.sums = {layer.name: torch.zeros(layer.key_size, layer.key_size, **like) for layer in layers}
        self.counts = {layer.name: torch.zeros((), **like) for layer in layers}

    @torch.no_grad()
    def read(self, batch: TokenBatch) -> None:
        """Run the model and add the keys of all tokens; those of a batch that does not count are left out."""
        batch = batch.to(self.lm.device)
        handles = []
        try:
            for layer in self.layers if batch.counts else ():
                module = self.lm.model.get_submodule(layer.name)
                handles.append(module.register_forward_pre_hook(self._hook(layer.name, batch.masks[layer.stack])))
            self.lm.logits(batch)
        finally:
            for handle in handles:
                handle.remove()

    def moments(self) -> dict[str, Tensor]:
        """E[u uᵀ] by layer. They take the sums' place, for they are as large."""
        return {name: total.div_(self.counts[name].clamp(min=1)) for name, total in self.sums.items()}

    def _hook(self, name: str, mask: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = rows_at(mask, args[0]).to(self.sums[name])
            self.sums[name].addmm_(rows.T, rows)
            self.counts[name] += len(rows)

        return hook
