"""The stem of a forward: the hidden states below the first edited block, which no edit reaches.

A forward of an edited model may start above it. It does not depend on θ, so the cache keeps it by fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from malmen.data.tokens import EncodedFact, TokenBatch
from malmen.lm.hooks import hooked, replaced_forward
from malmen.lm.layers import LayerSpec
from malmen.runs.fact_cache import FactCache

if TYPE_CHECKING:
    from malmen.lm.model import LanguageModel

Height = dict[str, int]  # by stack: a number of its blocks, from below


@dataclass
class Stem:
    """What the topmost block of each stack below a height puts out for one batch; empty until the batch has run."""

    height: Height
    outputs: dict[str, Any] = field(default_factory=dict)  # by stack


def stem_blocks(lm: LanguageModel, layers: list[LayerSpec]) -> Height:
    """How many blocks of each stack no edit can reach.

    A decoder that attends to an edited encoder is reached from its first block on.
    """
    first = {
        stack: min((layer.block for layer in layers if layer.stack == stack), default=len(lm.blocks(stack)))
        for stack in lm.stacks
    }
    if "encoder" in first and first["encoder"] < len(lm.blocks("encoder")):
        first["decoder"] = 0
    return {stack: count for stack, count in first.items() if count > 0}


def all_blocks(lm: LanguageModel) -> Height:
    """The height at which every block is below: what is left is the final norm and the head."""
    return {stack: len(lm.blocks(stack)) for stack in lm.stacks}


@contextmanager
def fill_or_resume(lm: LanguageModel, stem: Stem) -> Iterator[None]:
    """A run inside fills an empty stem. With a full one, of the same batch, it starts above it: the blocks below hand
    on what the stem holds."""
    if stem.outputs:
        skipped = [
            (block, partial(_hand_on, stem.outputs[stack]))
            for stack, count in stem.height.items()
            for block in lm.blocks(stack)[:count]
        ]
        with replaced_forward(skipped):
            yield
        return

    def keep(stack: str, _module: nn.Module, _args: Any, output: Any) -> None:
        stem.outputs[stack] = output
        lm.plain_blocks = isinstance(output, Tensor)

    with hooked([(lm.blocks(stack)[count - 1], partial(keep, stack)) for stack, count in stem.height.items()]):
        yield


def _hand_on(output: Any, *_args: Any, **_kwargs: Any) -> Any:
    return output


# --- by fact -----------------------------------------------------------------------------------------


def cache_kinds(lm: LanguageModel, *heights: Height) -> list[str]:
    """What the cache calls the stems of these heights; nothing where they cannot be kept by fact.

    An encoder-decoder's blocks hand on position biases of the whole batch beside the hidden states.
    """
    if lm.kind == "encoder-decoder":
        return []
    return [_kind(stack, count) for height in heights for stack, count in height.items()]


def remember_stem(
    cache: FactCache, lm: LanguageModel, batch: TokenBatch, facts: Sequence[EncodedFact],
    stems: Sequence[Stem],
) -> None:  # fmt: skip
    """Put the stems of a batch of these facts into the cache, fact by fact."""
    if lm.kind == "encoder-decoder" or not batch.counts:
        return
    hidden = {
        _kind(stack, stem.height[stack]): output if isinstance(output, Tensor) else output[0]
        for stem in stems
        for stack, output in stem.outputs.items()
    }
    lengths = batch.masks["decoder"].sum(-1).tolist()
    for row, (place, length) in enumerate(zip(batch.facts.tolist(), lengths, strict=True)):
        cache.put(facts[place], {kind: states[row, :length] for kind, states in hidden.items()})


def recall_stem(
    cache: FactCache, lm: LanguageModel, batch: TokenBatch, facts: Sequence[EncodedFact], height: Height
) -> Stem:
    """The stem of a batch of facts that the cache holds; padded places, which nothing reads, are zero."""
    outputs: dict[str, Any] = {}
    for stack, count in height.items():
        size = cast(Any, lm.model).config.hidden_size
        hidden = torch.zeros(*batch.masks[stack].shape, size, dtype=lm.dtype, device=lm.device)
        for row, place in enumerate(batch.facts.tolist() if batch.counts else ()):
            part = cache.get(_kind(stack, count), facts[place])
            hidden[row, : len(part)] = part
        outputs[stack] = hidden if _has_plain_blocks(lm, batch) else (hidden,)
    return Stem(height, outputs)


@torch.no_grad()
def _has_plain_blocks(lm: LanguageModel, batch: TokenBatch) -> bool:
    """Whether its blocks put out a tensor, not a tuple; runs one token if none has run in this process yet."""
    if lm.plain_blocks is None:
        with fill_or_resume(lm, Stem(all_blocks(lm))):
            lm.model(**{name: ids[:1, :1] for name, ids in batch.inputs.items()})
    assert lm.plain_blocks is not None
    return lm.plain_blocks


def _kind(stack: str, count: int) -> str:
    return f"hidden/{stack}/{count}"
