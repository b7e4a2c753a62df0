"""Oracles: each fact by itself through the whole model, unpadded, with weights that are really changed.

Nothing here uses malmen's batches, hooks, overlays or losses.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from malmen.data.tokens import EncodedFact
from malmen.lm.layers import LayerSpec
from malmen.lm.model import LanguageModel
from malmen.lm.trace import LayerTrace, Traces


def _inputs(fact: EncodedFact) -> dict[str, Tensor]:
    if fact.encoder_ids is not None:
        return {"input_ids": torch.tensor([fact.encoder_ids]), "decoder_input_ids": torch.tensor([fact.input_ids])}
    return {"input_ids": torch.tensor([fact.input_ids])}


def _answer_log_probs(kind: str, logits: Tensor, fact: EncodedFact) -> Tensor:
    """log p at the answer positions (answer tokens, vocabulary) from the full logits of one fact."""
    if kind == "classifier":  # one logit z: p(supports) is its sigmoid
        return torch.stack((-logits, logits), -1).reshape(1, 2).mul(0.5).log_softmax(-1)
    return logits[0, fact.first : fact.first + len(fact.targets)].log_softmax(-1)


def _nll(log_probs: Tensor, fact: EncodedFact) -> Tensor:
    return -torch.stack([row[target] for row, target in zip(log_probs, fact.targets, strict=True)]).sum()


def plain_log_probs(lm: LanguageModel, fact: EncodedFact, shifts: Mapping[str, Tensor]) -> Tensor:
    """log p at the answer positions, of the model with these shifts added to its weights."""
    model: Any = lm.model
    weights = dict(model.named_parameters())
    for name, shift in shifts.items():
        change = shift.T if isinstance(model.get_submodule(name), Conv1D) else shift
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + change
    return _answer_log_probs(lm.kind, functional_call(model, weights, (), _inputs(fact)).logits, fact)


def plain_nll(lm: LanguageModel, fact: EncodedFact, shifts: Mapping[str, Tensor]) -> Tensor:
    """−Σ log p over the answer's tokens, of the model with these shifts added to its weights."""
    return _nll(plain_log_probs(lm, fact, shifts), fact)


def plain_traces(lm: LanguageModel, layers: Sequence[LayerSpec], facts: Sequence[EncodedFact], tokens: str) -> Traces:
    """Keys and value gradients by the retained gradients of a copy whose every weight is trainable."""
    model: Any = copy.deepcopy(lm.model).requires_grad_(True)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            seen[name] = (args[0].detach(), output)

        return hook

    for layer in layers:
        model.get_submodule(layer.name).register_forward_hook(keep(layer.name))
    parts: dict[str, list[LayerTrace]] = {layer.name: [] for layer in layers}
    for fact in facts:
        _nll(_answer_log_probs(lm.kind, model(**_inputs(fact)).logits, fact), fact).backward()
        for layer in layers:
            keys, values = seen[layer.name]
            assert values.grad is not None
            keys, grads = (part.reshape(-1, part.shape[-1]) for part in (keys, values.grad))  # of this fact alone
            answers = slice(fact.first, fact.first + len(fact.targets))
            # An encoder has no answer positions: its whole prompt counts.
            rows = answers if tokens == "answer" and layer.stack == "decoder" else slice(None)
            parts[layer.name].append(LayerTrace(keys[rows], grads[rows]))
    return {
        name: LayerTrace(torch.cat([part.keys for part in found]), torch.cat([part.value_grads for part in found]))
        for name, found in parts.items()
    }
