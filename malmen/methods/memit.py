"""MEMIT: a value for each fact at its subject's last token, spread over several layers (Meng et al., ICLR 2023).

For each fact, δ moves the hidden state h that the last edited block puts out at the subject's last token, so that the
answer becomes probable. Layer by layer, what is left of δ is shared among the layers still to come:
S = R Kᵀ (w C + K Kᵀ)⁻¹, with the keys K of the subjects, their residuals R, and the second moment C of all other keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from malmen.config import Config
from malmen.data.records import Fact
from malmen.data.splits import training_records
from malmen.edit_method import PlainEdit, UntrainedMethod, finite, require_facts
from malmen.errors import EditError
from malmen.lm.key_moments import KeyMoments, key_moments, read_texts
from malmen.lm.layers import find_layers
from malmen.lm.model import LanguageModel
from malmen.lm.overlay import edited
from malmen.methods.subject_tokens import Placed, Places, hidden_at, keys_at
from malmen.methods.subject_values import find_values


class Memit(UntrainedMethod):
    """Needs the model, text to estimate the keys' moments from, and the subjects of the facts."""

    def __init__(self, lm: LanguageModel, config: Config) -> None:
        if lm.kind != "decoder":
            raise EditError(f"MEMIT edits decoders, by their subjects' last tokens; this model is of kind {lm.kind}")
        if len({parameter.device for parameter in lm.model.parameters()}) > 1:
            raise EditError("MEMIT needs the whole model on one device; model.device=split is for other methods")
        self.config, self.settings = config, config.baselines.memit
        self._moments: KeyMoments | None = None
        self.layers = sorted(find_layers(lm.model, self.settings.layers, "second"), key=lambda layer: layer.block)

    def prepare(self, lm: LanguageModel) -> float:
        """Compute the moments of keys, or read those that another run computed."""
        return self.moments(lm).seconds

    def edit(self, lm: LanguageModel, facts: Sequence[Fact]) -> PlainEdit:
        """The values of all facts, then the shifts layer by layer."""
        require_facts(facts)
        moments = self.moments(lm).by_layer
        places = Places(lm, self.config, self.settings.prefixes, self.settings.prefix_tokens)
        plain = [places.of(fact) for fact in facts]
        varied = [places.with_prefixes(fact) for fact in facts]
        block, budget = self.layers[-1].block, self.config.batch.token_budget
        before = hidden_at(lm, block, plain, budget)  # (facts, hidden)
        targets = before + find_values(lm, block, facts, varied, places, before, self.settings, budget)
        shifts: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            with edited(lm, shifts):
                keys = _mean_keys(lm, layer.name, varied, budget)
                rest = (targets - hidden_at(lm, block, plain, budget)) / (len(self.layers) - index)
            shifts[layer.name] = spread(keys, rest, moments[layer.name], self.settings.covariance_weight)
        with edited(lm, shifts):
            missed = targets - hidden_at(lm, block, plain, budget)
        wanted = (targets - before).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        return PlainEdit(finite(shifts), float((missed.norm(dim=-1) / wanted).mean()))

    def moments(self, lm: LanguageModel) -> KeyMoments:
        """C of each layer, computed once."""
        if self._moments is None:
            self._moments = key_moments(
                lm, self.layers, self._texts(), self.settings.corpus_tokens,
                token_budget=self.config.batch.token_budget, cache=Path(self.settings.cache_dir),
            )  # fmt: skip
        return self._moments

    def _texts(self) -> Iterable[str]:
        if self.settings.corpus is not None:
            return read_texts(Path(self.settings.corpus))
        records = training_records(self.config)(0)
        texts = [f"{fact.prompt} {fact.answer}" for record in records for fact in record.unrelated]
        return list(dict.fromkeys(texts)) or [record.edit.prompt for record in records]


def spread(keys: Tensor, residuals: Tensor, moment: Tensor, weight: float) -> Tensor:
    """S = R Kᵀ (w C + K Kᵀ)⁻¹ in float64; rows are facts: keys (facts, key), residuals (facts, value)."""
    keys, residuals = keys.double(), residuals.double()
    gram = weight * moment + keys.T @ keys
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed):
        raise EditError(
            "the keys' second moment is singular: the corpus is too small for this layer; give more text "
            "(baselines.memit.corpus, baselines.memit.corpus_tokens)"
        )
    return torch.cholesky_solve(keys.T @ residuals, factor).T


def _mean_keys(lm: LanguageModel, layer: str, varied: Sequence[Sequence[Placed]], budget: int) -> Tensor:
    """u at the subject's last token: half of it with nothing before the prompt, half with random texts (facts, key)."""
    flat = [placed for variants in varied for placed in variants]
    parts = keys_at(lm, layer, flat, budget).split([len(variants) for variants in varied])
    return torch.stack([(part[0] + part[1:].mean(0)) / 2 if len(part) > 1 else part[0] for part in parts])
