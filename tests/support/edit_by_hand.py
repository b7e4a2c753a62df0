"""MEMIT's way through the layers with nothing of ours but the values: plain forwards, weights that really change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from malmen.config import MemitConfig
from malmen.data.records import Fact
from malmen.lm.layers import LayerSpec, is_conv1d
from malmen.lm.model import LanguageModel
from malmen.methods.memit import Placed, Places, find_values

Solve = Callable[[str, Tensor, Tensor], Tensor]  # layer, keys (facts, key), residuals (facts, value): S


def edit_by_hand(
    lm: LanguageModel, layers: Sequence[LayerSpec], facts: Sequence[Fact], places: Places, settings: MemitConfig,
    solve: Solve,
) -> dict[str, Tensor]:  # fmt: skip
    """The shifts, added to the weights of `lm` one after the other; facts stand alone, without texts before them."""
    placed, block = [places.of(fact) for fact in facts], layers[-1].block
    before = hidden_by_hand(lm, block, placed)
    targets = before + find_values(lm, block, facts, [[one] for one in placed], places, before, settings, 10**9)
    shifts = {}
    for remaining, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        rest = (targets - hidden_by_hand(lm, block, placed)) / remaining
        shift = solve(layer.name, keys_by_hand(lm, layer.name, placed), rest)
        weight = lm.model.get_parameter(f"{layer.name}.weight")
        weight.data += shift.T if is_conv1d(lm.model.get_submodule(layer.name)) else shift
        shifts[layer.name] = shift
    return shifts


@torch.no_grad()
def hidden_by_hand(lm: LanguageModel, block: int, placed: Sequence[Placed]) -> Tensor:
    """The output of a block, not the last one, at each subject's last token (facts, hidden)."""
    model: Any = lm.model
    rows = [
        model(torch.tensor([one.encoded.input_ids]), output_hidden_states=True).hidden_states[block + 1][0]
        for one in placed
    ]
    return torch.stack([row[one.position] for row, one in zip(rows, placed, strict=True)])


@torch.no_grad()
def keys_by_hand(lm: LanguageModel, layer: str, placed: Sequence[Placed]) -> Tensor:
    """The input of a linear at each subject's last token (facts, key)."""
    model: Any = lm.model
    seen: list[Tensor] = []
    handle = model.get_submodule(layer).register_forward_hook(
        lambda _module, args, _output: seen.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    for one in placed:
        model(torch.tensor([one.encoded.input_ids]))
    handle.remove()
    return torch.stack([keys[one.position] for keys, one in zip(seen, placed, strict=True)])
