"""Hidden states that no edit reaches: what the blocks below the first edited one put out, kept and resumed from.

A forward of an edited model may start above them. They do not depend on θ, so the cache keeps them by fact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from malmen.data.tokens import EncodedFact, TokenBatch
from malmen.lm.layers import LayerSpec
from malmen.lm.model import LanguageModel
from malmen.runs.fact_cache import FactCache


@dataclass
class Stem:
    """What the blocks below the first edited one put out for one batch; it does not depend on any edit."""

    outputs: dict[str, Any]  # by stack: the output of its last block below


def stem_blocks(lm: LanguageModel, layers: list[LayerSpec]) -> dict[str, int]:
    """How many blocks of each stack no edit can reach.

    A decoder that attends to an edited encoder is reached from its first block on.
    """
    first = {
        stack: min((layer.block for layer in layers if layer.stack == stack), default=len(_blocks(lm, stack)))
        for stack in lm.stacks
    }
    if "encoder" in first and first["encoder"] < len(_blocks(lm, "encoder")):
        first["decoder"] = 0
    return {stack: count for stack, count in first.items() if count > 0}


@contextmanager
def keep_stem(lm: LanguageModel, blocks: dict[str, int]) -> Iterator[Stem]:
    """Runs inside leave their stem in the value."""
    stem = Stem({})
    handles = []

    def keep(stack: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            stem.outputs[stack] = _detach(output)
            lm.plain_blocks = isinstance(output, Tensor)

        return hook

    try:
        for stack, count in blocks.items():
            handles.append(_blocks(lm, stack)[count - 1].register_forward_hook(keep(stack)))
        yield stem
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def resume_stem(lm: LanguageModel, blocks: dict[str, int], stem: Stem) -> Iterator[None]:
    """Runs inside, of the same batch, start above the stem: the blocks below hand on what was kept."""
    replaced: list[tuple[nn.Module, Any]] = []
    try:
        for stack, count in blocks.items():
            kept = stem.outputs[stack]
            for block in _blocks(lm, stack)[:count]:
                replaced.append((block, block.__dict__.get("forward")))
                block.__dict__["forward"] = lambda *_args, _kept=kept, **_kwargs: _kept
        yield
    finally:
        for block, forward in replaced:
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = forward


def _blocks(lm: LanguageModel, stack: str) -> nn.ModuleList:
    return cast(nn.ModuleList, lm.model.get_submodule(lm.stacks[stack]))


def _detach(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.detach()
    return tuple(part.detach() if isinstance(part, Tensor) else part for part in output)


# --- by fact -----------------------------------------------------------------------------------------


def all_blocks(lm: LanguageModel) -> dict[str, int]:
    """The height at which every block is below: what is left is the final norm and the head."""
    return {stack: len(_blocks(lm, stack)) for stack in lm.stacks}


def cache_kinds(lm: LanguageModel, *heights: dict[str, int]) -> list[str]:
    """What the cache calls the stems of these heights; nothing where they cannot be kept by fact.

    An encoder-decoder's blocks hand on position biases of the whole batch beside the hidden states.
    """
    if lm.kind == "encoder-decoder":
        return []
    return [_kind(stack, count) for height in heights for stack, count in height.items()]


def remember_stem(
    cache: FactCache, lm: LanguageModel, batch: TokenBatch, facts: Sequence[EncodedFact],
    stems: Sequence[tuple[dict[str, int], Stem]],
) -> None:  # fmt: skip
    """Keep the stems of a batch of these facts, fact by fact."""
    if lm.kind == "encoder-decoder" or not batch.counts:
        return
    lengths = batch.masks["decoder"].sum(-1).tolist()
    for row, (place, length) in enumerate(zip(batch.facts.tolist(), lengths, strict=True)):
        parts = {
            _kind(stack, count): _hidden(stem.outputs[stack])[row, :length]
            for height, stem in stems
            for stack, count in height.items()
        }
        cache.put(facts[place], parts)


def recall_stem(
    cache: FactCache, lm: LanguageModel, batch: TokenBatch, facts: Sequence[EncodedFact], height: dict[str, int]
) -> Stem:
    """The stem of a batch of facts that the cache holds; padded places, which nobody looks at, are zero."""
    outputs: dict[str, Any] = {}
    for stack, count in height.items():
        size = cast(Any, lm.model).config.hidden_size
        hidden = torch.zeros(*batch.masks[stack].shape, size, dtype=lm.dtype, device=lm.device)
        for row, place in enumerate(batch.facts.tolist() if batch.counts else ()):
            part = cache.get(_kind(stack, count), facts[place])
            hidden[row, : len(part)] = part
        outputs[stack] = hidden if _has_plain_blocks(lm, batch) else (hidden,)
    return Stem(outputs)


@torch.no_grad()
def _has_plain_blocks(lm: LanguageModel, batch: TokenBatch) -> bool:
    """Whether its blocks put out a tensor; where none has run in this process yet, one token shows it."""
    if lm.plain_blocks is None:
        with keep_stem(lm, all_blocks(lm)):
            lm.model(**{name: ids[:1, :1] for name, ids in batch.inputs.items()})
    assert lm.plain_blocks is not None
    return lm.plain_blocks


def _kind(stack: str, count: int) -> str:
    return f"hidden/{stack}/{count}"


def _hidden(output: Any) -> Tensor:
    return cast(Tensor, output if isinstance(output, Tensor) else output[0])
