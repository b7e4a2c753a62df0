"""The second moment of a layer's keys, E[u uᵀ], over plain text: what MEMIT must not disturb.

Computed once, text by text, and kept in a file whose name is a hash of all it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from malmen.data.tokens import EncodedFact, make_batches
from malmen.errors import EditError
from malmen.layers import LayerSpec
from malmen.lm import LanguageModel
from malmen.trace import rows_at

_TEXTS_AT_ONCE = 256


def read_texts(path: Path) -> list[str]:
    """One text a line."""
    try:
        texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"cannot read the corpus {path}: {error}") from error
    found = [text for text in texts if text]
    if not found:
        raise EditError(f"the corpus {path} holds no text: expected one text a line")
    return found


def key_moments(
    lm: LanguageModel, layers: Sequence[LayerSpec], texts: Iterable[str], max_tokens: int, *,
    token_budget: int = 4096, cache: Path | None = None, on_tokens: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """E[u uᵀ] by layer (key, key) in float64, over the first `max_tokens` tokens of the texts."""
    listed = list(texts)
    about = [lm.fingerprint(), [layer.name for layer in layers], max_tokens, listed]
    name = hashlib.sha256(json.dumps(about, ensure_ascii=False).encode()).hexdigest()[:32]
    kept = cache / f"{name}.safetensors" if cache is not None else None
    if kept is not None and kept.is_file():
        return {key: found.to(lm.device) for key, found in load_file(kept).items()}
    sums = {layer.name: torch.zeros(layer.key_size, layer.key_size, dtype=torch.float64) for layer in layers}
    sums = {key: total.to(lm.device) for key, total in sums.items()}
    count = 0
    for encoded in _some_at_a_time(lm, listed, max_tokens):
        for batch in make_batches(encoded, token_budget, lm.pad_id):
            batch = batch.to(lm.device)
            with torch.no_grad(), _added_up(lm, sums, batch.masks["decoder"]):
                lm.logits(batch)
            count += int(batch.masks["decoder"].sum())
        if on_tokens:
            on_tokens(count)
    moments = {key: total / max(count, 1) for key, total in sums.items()}
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:  # several may compute the same at the same time
            save_file({key: found.cpu().contiguous() for key, found in moments.items()}, Path(scratch) / kept.name)
            os.replace(Path(scratch) / kept.name, kept)
    return moments


def _some_at_a_time(lm: LanguageModel, texts: Sequence[str], max_tokens: int) -> Iterator[list[EncodedFact]]:
    """Texts as token lists, none longer than the model reads, until there are enough tokens."""
    longest, taken = lm.max_positions or 1024, 0
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        encoded = []
        for ids in lm.tokenizer(list(texts[first : first + _TEXTS_AT_ONCE]))["input_ids"]:
            ids = ids[: min(longest, max_tokens - taken)]
            taken += len(ids)
            if ids:
                encoded.append(EncodedFact(ids, len(ids) - 1, [0]))
        if encoded:
            yield encoded
        if taken >= max_tokens:
            return


class _added_up:
    """Runs inside add each layer's u uᵀ, of the tokens that are no padding, to its sum."""

    def __init__(self, lm: LanguageModel, sums: dict[str, Tensor], mask: Tensor) -> None:
        self.lm, self.sums, self.mask = lm, sums, mask
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, total in self.sums.items():
            self.handles.append(self.lm.model.get_submodule(name).register_forward_pre_hook(self._hook(total)))

    def _hook(self, total: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = rows_at(self.mask, args[0]).double()
            total.addmm_(rows.T, rows)

        return hook

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
