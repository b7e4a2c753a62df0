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

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from malmen.data.tokens import EncodedFact, make_batches
from malmen.errors import EditError
from malmen.key_sums import KeySums
from malmen.layers import LayerSpec
from malmen.lm import LanguageModel

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
