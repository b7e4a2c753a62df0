"""The second moment of a layer's keys, E[u uᵀ], over texts whose outputs an edit should not disturb."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from malmen.data.tokens import EncodedFact, TokenBatch, make_batches
from malmen.errors import EditError
from malmen.lm.hooks import hooked
from malmen.lm.layers import LayerSpec
from malmen.lm.trace import rows_at

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

_SUMS_BYTES = 4 * 2**30  # of sums held at once; the texts are read again for the layers beyond it
_TEXTS_AT_ONCE = 256  # given to the tokenizer in one call
_UNLIMITED_LENGTH = 1024  # tokens of a text, at most, where the model itself sets no limit


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

        def add(layer: LayerSpec, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = rows_at(batch.masks[layer.stack], args[0])
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            # A batch's product needs no more digits than the moment is kept in; the sum over batches does.
            self.sums[layer.name] += rows.T @ rows
            self.counts[layer.name] += len(rows)

        hooks = [(self.lm.model.get_submodule(layer.name), partial(add, layer)) for layer in self.layers]
        with hooked(hooks if batch.counts else [], before=True):
            self.lm.logits(batch)

    def read_differences(self, batches: Sequence[TokenBatch], others: Sequence[TokenBatch]) -> None:
        """Add u − u′ for the keys u of the tokens that predict the answers of some facts, and u′ of as many others with
        the same answers in the same order."""
        mine, theirs = self._answer_keys(batches), self._answer_keys(others)
        for layer in self.layers:
            rows = mine[layer.name] - theirs[layer.name]
            self.sums[layer.name] += rows.T @ rows
            self.counts[layer.name] += len(rows)

    @torch.no_grad()
    def _answer_keys(self, batches: Sequence[TokenBatch]) -> dict[str, Tensor]:
        """By layer, the keys of the tokens that predict the answers (tokens, key), in the order of the facts."""
        rows: dict[str, list[Tensor]] = {layer.name: [torch.zeros(0, layer.key_size)] for layer in self.layers}
        facts = [torch.zeros(0, dtype=torch.long)]

        def keep(layer: LayerSpec, mask: Tensor, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows[layer.name].append(rows_at(mask, args[0]))

        for batch in (given.to(self.lm.device) for given in batches):
            mask = batch.answer_mask
            hooks = [(self.lm.model.get_submodule(layer.name), partial(keep, layer, mask)) for layer in self.layers]
            with hooked(hooks if batch.counts else [], before=True):
                self.lm.logits(batch)
            if batch.counts:
                facts.append(batch.fact_of(mask))
        order = torch.cat([part.to(self.lm.device) for part in facts]).argsort(stable=True)
        wide = torch.promote_types(self.lm.dtype, torch.float32)
        return {
            name: torch.cat([part.to(self.lm.device, wide) for part in parts])[order] for name, parts in rows.items()
        }

    def moments(self) -> dict[str, Tensor]:
        """E[u uᵀ] by layer. They take the sums' place, for they are as large."""
        return {name: total.div_(self.counts[name].clamp(min=1)) for name, total in self.sums.items()}


def layers_at_once(layers: Sequence[LayerSpec], terms: int = 1, limit: int = _SUMS_BYTES) -> list[list[LayerSpec]]:
    """Parts of the layers whose sums, for so many terms, fit into so many bytes; each has one at least."""
    parts: list[list[LayerSpec]] = []
    for layer in layers:
        if parts and sums_bytes([*parts[-1], layer], terms) <= limit:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return parts


def sums_bytes(layers: Sequence[LayerSpec], terms: int = 1) -> int:
    """The memory of these layers' sums; of several terms, they are held once more when they are joined."""
    copies = terms if terms == 1 else 2 * terms
    return copies * sum(torch.float64.itemsize * layer.key_size**2 for layer in layers)


# --- of a corpus, kept in a file whose name is a hash of all it depends on -----------------------------


@dataclass(frozen=True)
class KeyMoments:
    """E[u uᵀ] by layer (key, key) in float64, and the seconds that computing it took, now or when it was first done."""

    by_layer: dict[str, Tensor]
    seconds: float


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a corpus, one a line; only as much of the file is read as is used."""
    try:
        with path.open(encoding="utf-8") as file:
            texts = (line.strip() for line in file if line.strip())
            first = next(texts, None)
            if first is None:
                raise EditError(f"the corpus {path} holds no text: expected one text a line")
            yield first
            yield from texts
    except (OSError, UnicodeDecodeError) as error:
        raise EditError(f"cannot read the corpus {path}: {error}") from error


def key_moments(
    lm: LanguageModel, layers: Sequence[LayerSpec], texts: Iterable[str], max_tokens: int, *,
    token_budget: int = 4096, cache: Path,
) -> KeyMoments:  # fmt: skip
    """Of the first `max_tokens` tokens of the texts; `cache` is the folder of moments that were computed before."""
    facts = list(_encode(lm, texts, max_tokens))
    about = [lm.fingerprint(), [layer.name for layer in layers], [fact.input_ids for fact in facts]]
    file = cache / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.safetensors"
    if file.is_file():
        with safe_open(file, framework="pt") as stored:
            return KeyMoments(load_file(file, str(lm.device)), float(stored.metadata()["seconds"]))
    began, sums = time.perf_counter(), KeySums(lm, layers)
    for batch in make_batches(facts, token_budget, lm.pad_id):
        sums.read(batch)
    moments = KeyMoments(sums.moments(), time.perf_counter() - began)
    cache.mkdir(parents=True, exist_ok=True)
    tensors = {layer: moment.cpu().contiguous() for layer, moment in moments.by_layer.items()}
    with tempfile.TemporaryDirectory(dir=cache) as scratch:  # several processes may compute the same at once
        save_file(tensors, Path(scratch) / file.name, metadata={"seconds": str(moments.seconds)})
        (Path(scratch) / file.name).replace(file)
    return moments


def _encode(lm: LanguageModel, texts: Iterable[str], max_tokens: int) -> Iterator[EncodedFact]:
    """Texts as token lists, none longer than the model reads, until there are enough tokens."""
    longest, num_tokens, remaining = lm.max_positions or _UNLIMITED_LENGTH, 0, iter(texts)
    while part := list(islice(remaining, _TEXTS_AT_ONCE)):
        for ids in lm.tokenizer(part)["input_ids"]:
            ids = ids[: min(longest, max_tokens - num_tokens)]
            num_tokens += len(ids)
            if ids:
                yield EncodedFact(ids, len(ids) - 1, [0])
        if num_tokens >= max_tokens:
            return
